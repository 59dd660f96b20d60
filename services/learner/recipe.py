"""What a recipe makes of one step: rows, the loss to call, what it needs computed first, what to report.

A recipe computes no logprob itself. Invariant: what a row's tokens weigh is fixed here, from all rows of
the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.learner.datum import Datum
from services.learner.trainer import LossCall

Report = Callable[[Sequence[Datum], Sequence[Sequence[float]]], dict[str, float]]
"""(the step's rows with every input, lp of each position before the step) → metrics."""


def _nothing(rows: Sequence[Datum], logprobs: Sequence[Sequence[float]]) -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class StepRows:
    """`data`: this optimizer step's rows; none = nothing to learn from, the step is skipped and recorded.

    `record`: every row of the rollout record, by name, where the record gets several steps; before the
    first, the learner's logprobs of all of them are computed and kept, and each row of `data` (they are
    among them, by name) gets its own as the input `old_logprobs`. Empty = one step, lp_old = sg(lp).
    `reference`: every row of `data` gets the reference's logprobs as the input `ref_logprobs`, at the
    call's temperature. `report` is asked after the forward pass; `metrics` are known before."""

    data: Sequence[Datum]
    call: LossCall
    metrics: Mapping[str, float]
    record: Sequence[Datum] = ()
    reference: bool = False
    report: Report = field(default=_nothing)
