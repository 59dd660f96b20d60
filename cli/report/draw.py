"""A run's history on the terminal: the charts that its facts have values for, and the time per stage."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from cli.report.chart import GUTTER, Span, bars, beside, chart
from cli.report.history import History, Points
from cli.terminal import out

NARROW, WIDE = 72, 120
GAP = 2

CHARTS = (
    ("loss", "loss"),
    ("margin", "margin, chosen over rejected"),
    ("accuracy", "share of pairs ranked right"),
    ("kl", "KL to the start (k3)"),
    ("mismatch_mean", "mismatch mean |lp−q|"),
    ("mismatch_max", "mismatch max |lp−q|"),
    ("ratio_mean", "ratio mean exp(lp−q)"),
    ("effective_sample_size", "effective sample size"),
    ("completion_tokens_mean", "tokens per completion, mean"),
    ("completion_tokens_max", "tokens per completion, max"),
    ("grad_norm", "gradient norm"),
    ("learning_rate", "learning rate"),
)


def draw(history: History) -> None:
    width = min(out.width, WIDE)
    for line in lines(history, width):
        out.print(line.rstrip(), markup=False)


def lines(history: History, width: int) -> Iterator[str]:
    """Two charts in a row where the width has room for them."""
    drawn = list(_series(history))
    one = (width - GAP) // 2 if width >= NARROW else width
    # The same axis for all, from the start's score (step 0) on if there are scores.
    first = 0 if history.baseline is not None and history.scores else 1
    last = max((step["step"] for step in history.steps), default=1)
    charts = [
        chart(title, points, first, last, one, marked=history.skipped, largest=title.endswith(("max", "max |lp−q|")))
        for title, points in drawn
    ]
    if charts:
        yield ""
        yield from wrap(_legend(history, Span(first, last, one - GUTTER)), width)
    per_row = 2 if width >= NARROW else 1
    for start in range(0, len(charts), per_row):
        row = charts[start : start + per_row]
        yield ""
        yield from beside(row[0], row[1], GAP) if len(row) == 2 else row[0]
    if history.seconds:
        yield ""
        yield "time per stage"
        yield from bars(history.seconds, width, " s")


def _series(history: History) -> Iterator[tuple[str, Points]]:
    scores = history.scores
    if history.baseline is not None and scores:
        scores = [(0, history.baseline), *scores]
    # A record's reward stands for each step that uses it, so that the columns have no gaps.
    rewards = history.rewards(each_step=True)
    if rewards:
        yield "reward", rewards
    if scores:
        yield "held-out score", scores
    for name, title in CHARTS:
        points = history.metric(name)
        if points:
            yield title, points


def _legend(history: History, span: Span) -> str:
    start = " (0: before the run)" if span.first == 0 else ""
    binned = f"; a column holds {span.per_column}" if span.per_column > 1 else ""
    skipped = f"; × {len(history.skipped)} skipped" if history.skipped else ""
    return f"optimizer steps {span.first} to {span.last}{start}{binned}{skipped}"
