"""One run, or several to compare, as a picture with a panel per question."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from cli.report.collect import STAGES
from cli.report.history import WAITING, History, Points

COLOURS = ("#2f6db5", "#d1652c", "#3c8d57", "#9a4fa3", "#b59a2f", "#555555")
STAGE_COLOURS = dict(zip((*STAGES.values(), WAITING), (*COLOURS[:4], "#c9c9c9"), strict=True))
LONG = 120
BELOW = (0.5, -0.16)
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)))


@dataclass(frozen=True)
class Line:
    """`right`: on an axis of its own. `marker`: points that are far apart."""

    name: str
    points: Callable[[History], Points]
    right: bool = False
    marker: str = ""


@dataclass(frozen=True)
class Panel:
    """`title` empty: the names of what is drawn."""

    title: str
    lines: tuple[Line, ...]


def _metric(name: str, label: str, right: bool = False) -> Line:
    return Line(label, lambda history: history.metric(name), right)


PANELS = (
    Panel(
        "",
        (
            Line("reward", lambda history: history.rewards()),
            Line("held-out score", lambda history: _scores(history), marker="D"),
        ),
    ),
    Panel("loss", (_metric("loss", "loss"),)),
    Panel("preference", (_metric("margin", "margin"), _metric("accuracy", "accuracy", right=True))),
    Panel(
        "distance: KL to the start, mismatch |lp−q|",
        (_metric("kl", "KL (k3)"), _metric("mismatch_mean", "mismatch mean"), _metric("mismatch_max", "mismatch max")),
    ),
    Panel(
        "tokens per completion",
        (
            _metric("completion_tokens_mean", "mean"),
            _metric("completion_tokens_max", "max"),
            _metric("truncated_share", "share cut", right=True),
        ),
    ),
    Panel("gradient", (_metric("grad_norm", "gradient norm"), _metric("learning_rate", "learning rate", right=True))),
)


def plot_runs(histories: Sequence[History], path: Path) -> bool:
    """The panels that some run has values for, as PNG. False, and no file, when there are none."""
    panels = [panel for panel in PANELS if any(line.points(run) for run in histories for line in panel.lines)]
    timed = any(run.seconds for run in histories)
    count = len(panels) + timed
    if count == 0:
        return False
    across = min(count, 3 if count > 4 else 2)
    down = -(-count // across)
    figure = Figure(figsize=(5.2 * across, 3.3 * down + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(down, across, place + 1) for place in range(count)]
    for axis, panel in zip(axes, panels, strict=False):
        _draw(axis, panel, histories)
    if timed:
        _stages(axes[-1], histories)
    if len(histories) == 1:
        figure.suptitle(histories[0].label, fontsize=12)
    else:
        handles = [Line2D([], [], color=_colour(place), lw=2.5) for place in range(len(histories))]
        labels = [run.label for run in histories]
        figure.legend(handles, labels, loc="outside upper center", ncols=min(3, len(labels)), frameon=False)
    figure.savefig(path, dpi=120, format="png")
    return True


def _draw(axis: Axes, panel: Panel, histories: Sequence[History]) -> None:
    right = axis.twinx() if any(line.right and line.points(run) for line in panel.lines for run in histories) else None
    drawn: dict[str, Line2D] = {}
    for place, run in enumerate(histories):
        for number, line in enumerate(panel.lines):
            points = line.points(run)
            if not points:
                continue
            target = right if line.right and right is not None else axis
            colour = _colour(place) if len(histories) > 1 else _colour(number)
            found = _curve(target, points, line.marker, colour, DASHES[number])
            name = f"{line.name} (right)" if line.right else line.name
            key = (
                found if len(histories) == 1 else Line2D([], [], color="#555555", ls=DASHES[number], marker=line.marker)
            )
            drawn.setdefault(name, key)
        if panel.title == "loss" and run.skipped:
            (marks,) = axis.plot(
                run.skipped, [0.02] * len(run.skipped), "x", color="#b03030", transform=axis.get_xaxis_transform()
            )
            drawn.setdefault("skipped", marks)
    _dress(axis, right, panel.title or " and ".join(drawn))
    if any(_is_long(line.points(run)) for run in histories for line in panel.lines):
        axis.set_xlabel("step (bold: moving mean)", fontsize=9, labelpad=1)
    if len(drawn) > 1:
        # Below the axis, where it hides no curve.
        handles, names = list(drawn.values()), list(drawn)
        axis.legend(
            handles, names, ncols=len(names), loc="upper center", bbox_to_anchor=BELOW, fontsize=8, frameon=False
        )


def _curve(axis: Axes, points: Points, marker: str, colour: str, dashes: Any) -> Line2D:
    """Of a long series, each value faintly, and its moving mean, which is what can be read."""
    steps, values = [step for step, _ in points], [value for _, value in points]
    if _is_long(points):
        axis.plot(steps, values, color=colour, linewidth=0.7, alpha=0.25)
        values = _moving_mean(values)
    marker = marker or ("o" if len(points) == 1 else "")
    (found,) = axis.plot(steps, values, color=colour, linestyle=dashes, linewidth=1.6, marker=marker, markersize=4.5)
    return found


def _is_long(points: Points) -> bool:
    return len(points) > LONG


def _moving_mean(values: Sequence[float]) -> list[float]:
    """Centred, over a twentieth of the series, over what there is at its ends."""
    half = max(1, len(values) // 40)
    windows = [values[max(0, place - half) : place + half + 1] for place in range(len(values))]
    return [math.fsum(window) / len(window) for window in windows]


def _dress(axis: Axes, right: Axes | None, title: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("step", fontsize=9, labelpad=1)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.25)
    for each in (axis, right):
        if each is not None:
            each.tick_params(labelsize=8)
            each.spines["top"].set_visible(False)


def _stages(axis: Axes, histories: Sequence[History]) -> None:
    names = list(dict.fromkeys(name for run in histories for name in run.seconds))
    at = list(range(len(histories)))[::-1]
    if len(histories) == 1:
        values = [histories[0].seconds[name] for name in names]
        colours = [STAGE_COLOURS[name] for name in names]
        rows = axis.barh(names[::-1], values[::-1], color=colours[::-1], height=0.6)
        axis.bar_label(rows, fmt="%.1f s", fontsize=8, padding=3)
        axis.margins(x=0.18)
    else:
        start = [0.0] * len(histories)
        for name in names:
            values = [run.seconds.get(name, 0.0) for run in histories]
            axis.barh(at, values, left=start, label=name, color=STAGE_COLOURS[name], height=0.6)
            start = [begin + value for begin, value in zip(start, values, strict=True)]
        axis.set_yticks(at, [str(run.run["run_id"])[:8] for run in histories])
        axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=BELOW, ncols=3)
    axis.set_title("time per stage", fontsize=10)
    axis.set_xlabel("seconds", fontsize=9, labelpad=1)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25, axis="x")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _scores(history: History) -> Points:
    start = [(0, history.baseline)] if history.baseline is not None else []
    return [*start, *history.scores]


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]
