"""Small charts of block characters: points in, lines of text out, the same on a terminal and in a pipe.

Invariant: every line of a chart has exactly the width that was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

BLOCKS = " ▁▂▃▄▅▆▇█"
GUTTER = 9
WIDEST_STEP = 4


@dataclass(frozen=True)
class Span:
    """The steps that a chart covers, and how they fall into its columns: several columns a step, or several
    steps a column, always whole ones."""

    first: int
    last: int
    columns: int

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    @property
    def per_column(self) -> int:
        return -(-self.steps // self.columns)

    @property
    def per_step(self) -> int:
        """Columns a step; 1 also where a column holds several."""
        return max(1, min(WIDEST_STEP, self.columns // self.steps))

    @property
    def used(self) -> int:
        return -(-self.steps // self.per_column) * self.per_step

    def of(self, step: int) -> range:
        """The columns of a step."""
        start = (step - self.first) // self.per_column * self.per_step
        return range(start, start + self.per_step)


def chart(
    title: str,
    points: Sequence[tuple[int, float]],
    first: int,
    last: int,
    width: int,
    height: int = 3,
    marked: Collection[int] = (),
    largest: bool = False,
) -> list[str]:
    """`points` (step, value) as columns over the steps `first` to `last`; those in `marked` get a × on the
    axis. Steps that share a column show their mean, or the largest value with `largest`. The labels are the
    least and greatest column and the last value."""
    span = Span(first, last, width - GUTTER)
    values = _columns(points, span, largest)
    drawn = [value for value in values if value is not None]
    low, high, latest = min(drawn), max(drawn), points[-1][1]
    flat = math.isclose(high, low, rel_tol=1e-9)
    top, bottom, end = labels(high, high if flat else low, latest)
    levels = [None if value is None else _level(value, low, high, height) for value in values]
    lines = [f"{title}  last {end}"[:width].ljust(width)]
    for row in range(height - 1, -1, -1):
        label = top if row == height - 1 else bottom if row == 0 and not flat else ""
        cells = "".join(" " if level is None else BLOCKS[max(0, min(8, level - 8 * row))] for level in levels)
        lines.append(f"{label:>{GUTTER - 2}} {'┤' if label else '│'}{cells}".ljust(width))
    lines.append(f"{'':{GUTTER - 1}}└{_axis(span, marked)}".ljust(width))
    lines.append(f"{'':{GUTTER}}{_ends(span)}".ljust(width))
    return lines


def bars(values: Mapping[str, float], width: int, unit: str) -> list[str]:
    """One line per name: its bar, its value and its share of the sum."""
    names = max(len(name) for name in values)
    total, most = sum(values.values()) or 1.0, max(values.values()) or 1.0
    room = max(8, width - names - 20)
    lines = []
    for name, value in values.items():
        eighths = round(value / most * room * 8)
        bar = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
        lines.append(f"{name:{names}} {bar:{room}} {number(value):>8}{unit} {value / total:>5.0%}".ljust(width))
    return lines


def beside(left: Sequence[str], right: Sequence[str], gap: int = 2) -> list[str]:
    """Two charts of the same height next to each other."""
    return [f"{a}{'':{gap}}{b}" for a, b in zip(left, right, strict=True)]


def labels(high: float, low: float, *others: float) -> list[str]:
    """Each value with as many digits as tell the two ends apart, in at most seven characters."""
    spread = high - low
    decimals = 2 - math.floor(math.log10(spread)) if spread > 0 else -1
    texts = [f"{value:.{decimals}f}" if 0 < decimals <= 5 else number(value) for value in (high, low, *others)]
    texts = [text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text for text in texts]
    return [text if len(text) <= 7 else number(value) for text, value in zip(texts, (high, low, *others), strict=True)]


def number(value: float) -> str:
    """At most seven characters, three significant digits where the value has a fraction."""
    size = abs(value)
    if 1000 <= size < 1e6:
        return f"{value:.0f}"
    if size >= 1e6 or 0 < size < 1e-4:
        return f"{value:.0e}"
    text = f"{value:.2g}" if size < 0.001 else f"{value:.3g}"
    return text if len(text) <= 7 else f"{value:.0e}"


def _columns(points: Sequence[tuple[int, float]], span: Span, largest: bool) -> list[float | None]:
    held: list[list[float]] = [[] for _ in range(span.used)]
    for step, value in points:
        for column in span.of(step):
            held[column].append(value)
    return [(max(cell) if largest else math.fsum(cell) / len(cell)) if cell else None for cell in held]


def _level(value: float, low: float, high: float, height: int) -> int:
    """Eighths of a row, at least one, so that the least value is still seen."""
    if math.isclose(high, low, rel_tol=1e-9):
        return 4 * height
    return 1 + round((value - low) / (high - low) * (8 * height - 1))


def _axis(span: Span, marked: Collection[int]) -> str:
    cells = ["─"] * span.used
    for step in marked:
        if span.first <= step <= span.last:
            cells[span.of(step)[0]] = "×"
    return "".join(cells)


def _ends(span: Span) -> str:
    first, last = str(span.first), str(span.last)
    if span.first == span.last or span.used < len(first) + len(last) + 1:
        return first if span.first == span.last else f"{first}–{last}"
    return first + last.rjust(span.used - len(first))
