"""Micro-batches over the rows of one or several policies.

In: each policy's rows and its adapter. Out: batches of bounded size in which a policy's rows stand
together, so that each adapter has one span. Invariant: the plan is a function of the rows' lengths alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.learner.datum import Datum, cost, units
from services.learner.lora import Span

SpanOf = Callable[[int, int], Span]
"""(first token, one past the last) → the adapter over that stretch."""


@dataclass(frozen=True)
class Share:
    """One policy's rows; `span` None = no adapter."""

    data: Sequence[Datum]
    span: SpanOf | None


@dataclass(frozen=True)
class Part:
    """The rows of share number `share` that are in one batch; `indices` are theirs within the share."""

    share: int
    indices: Sequence[int]
    rows: Sequence[Datum]
    span: SpanOf | None


@dataclass(frozen=True)
class Batch:
    parts: Sequence[Part]

    @property
    def rows(self) -> list[Datum]:
        return [row for part in self.parts for row in part.rows]


def plan_batches(shares: Sequence[Share], max_tokens: int, padded: bool) -> list[Batch]:
    """Batches of at most `max_tokens` tokens, padding included where rows are `padded` (one unit at least).

    Within a share the longest rows come first, so that little of a padded batch is padding and rows of
    one length stand side by side. Raises Fatal for a pair that is not two rows."""
    batches: list[list[tuple[int, int]]] = []
    rows: list[Datum] = []
    for number, share in enumerate(shares):
        for unit in units(share.data):
            added = [share.data[index] for index in unit]
            if batches and cost([*rows, *added], padded) <= max_tokens:
                rows += added
            else:
                batches.append([])
                rows = added
            batches[-1] += [(number, index) for index in unit]
    return [_batch(shares, members) for members in batches]


def _batch(shares: Sequence[Share], members: Sequence[tuple[int, int]]) -> Batch:
    indices: dict[int, list[int]] = {}
    for number, index in members:
        indices.setdefault(number, []).append(index)
    return Batch(
        [Part(number, taken, [shares[number].data[i] for i in taken], shares[number].span)
         for number, taken in indices.items()]
    )  # fmt: skip
