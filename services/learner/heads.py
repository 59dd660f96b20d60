"""What is made of logits: the weighed loss of a micro-batch, by a loss function of the targets' logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.learner.datum import Datum
from services.learner.joint import Weighed
from services.learner.logprobs import target_logprobs
from services.learner.losses import Rows, loss_named
from services.learner.passes import by_row, flat_input, targets_of
from shared.errors import Fatal


@dataclass(frozen=True)
class LossCall:
    """A loss by name, its settings, and the temperature that logits are divided by."""

    name: str
    config: Mapping[str, float | str] = field(default_factory=dict)
    temperature: float = 1.0


class LossHead:
    """Σ c·ℓ of the named loss. Raises Fatal for one that is unknown."""

    def __init__(self, call: LossCall) -> None:
        self._call, self._loss = call, loss_named(call.name, call.config)

    @property
    def needs(self) -> frozenset[str]:
        return self._loss.needs

    def check_pairs(self, rows: Sequence[Datum]) -> None:
        """Raises Fatal naming a row without a pair where the loss is one of pairs."""
        alone = next((row.name for row in rows if not row.pair), None) if self._loss.paired else None
        if alone is not None:
            raise Fatal(f"row {alone}: the loss {self._call.name} is of pairs, and this row has none")

    def __call__(self, indices: Sequence[int], rows: Sequence[Datum], logits: Tensor) -> Weighed:
        lp = target_logprobs(logits, targets_of(rows, logits.device), self._call.temperature)
        inputs = {name: flat_input(rows, name, lp) for name in rows[0].inputs}
        weighed = self._loss(lp, inputs, self._call.config, _layout(rows, lp.device)) * _coefficients(rows, lp)
        values = by_row(rows, lp.detach())
        return Weighed(weighed.sum(), values, not_finite(rows, weighed))


def not_finite(rows: Sequence[Datum], weighed: Tensor) -> Fatal | None:
    """Names the row of the first of [N] that is not."""
    bad = (~torch.isfinite(weighed.detach())).nonzero()
    if not len(bad):
        return None
    owner = [row.name for row in rows for _ in range(row.weighed)]
    at = int(bad[0])
    return Fatal(f"row {owner[at]}: its loss is {weighed[at].item()}; no step was made")


def _coefficients(rows: Sequence[Datum], lp: Tensor) -> Tensor:
    values = [c for row in rows for c, taken in zip(row.coefficients or _ones(row), row.mask, strict=True) if taken]
    return torch.tensor(values, dtype=lp.dtype, device=lp.device)


def _ones(row: Datum) -> tuple[float, ...]:
    return (1.0,) * len(row.mask)


def _layout(rows: Sequence[Datum], device: torch.device) -> Rows:
    owner = torch.tensor([number for number, row in enumerate(rows) for _ in range(row.weighed)], device=device)
    members: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        if row.pair:
            members.setdefault(row.pair, []).append(number)
    pairs = torch.tensor(list(members.values()), dtype=torch.long, device=device).reshape(-1, 2)
    return Rows(owner, len(rows), pairs)
