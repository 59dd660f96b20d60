"""Times to the first token as curves: which share of requests had its first token within how long."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

TITLES = {
    "overhead.one_caller": "one caller: ours (mint) and bare vLLM",
    "overhead.half_rate": "half of bare vLLM's saturation rate",
    "burst": "warm policies, quiet and under 32 cold loads",
    "churn": "one alias, still and moving",
}


def draw(series: Mapping[str, Mapping[str, list[float]]], path: Path) -> None:
    """`series`: seconds, by part and by name; parts without any are left out."""
    shown = [(part, title) for part, title in TITLES.items() if any(series.get(part, {}).values())]
    if not shown:
        return
    figure = Figure(figsize=(6 * len(shown), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (part, title) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for name, seconds in series[part].items():
            ranked = sorted(seconds)
            shares = [(place + 1) / len(ranked) for place in range(len(ranked))]
            axes.step([1000.0 * value for value in ranked], shares, where="post", label=f"{name} ({len(ranked)})")
        axes.set_title(title)
        axes.set_xscale("log")
        axes.set_xlabel("time to the first token, ms")
        axes.set_ylabel("share of requests")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
