"""What a recipe makes of one step: the rows, the loss to call, and what it already knows to report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.learner.datum import Datum
from services.learner.trainer import LossCall


@dataclass(frozen=True)
class StepRows:
    """No `data` = nothing to learn from; the step is skipped and recorded as such."""

    data: Sequence[Datum]
    call: LossCall
    metrics: dict[str, float]
