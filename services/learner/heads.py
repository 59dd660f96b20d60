"""What is made of logits: the weighed loss of a micro-batch, by a loss function of the targets' logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

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

    def check_inputs(self, rows: Sequence[Datum]) -> None:
        """Raises Fatal naming the first row that lacks what the loss needs."""
        for row in rows:
            missing = self.needs - row.inputs.keys()
            if missing:
                raise Fatal(f"row {row.name}: the loss needs {', '.join(sorted(missing))}")

    def __call__(self, indices: Sequence[int], rows: Sequence[Datum], logits: Tensor) -> Weighed:
        lp = target_logprobs(logits, targets_of(rows, logits.device), self._call.temperature)
        weighed = self._weigh(rows, lp)
        return Weighed(weighed.sum(), by_row(rows, lp.detach()), not_finite(rows, weighed))

    def value(self, rows: Sequence[Datum], logprobs: Sequence[Sequence[float]]) -> float:
        """The loss where the logprobs are known: what a forward pass reports, without gradients. Raises Fatal
        for one that is not finite."""
        known = zip(rows, logprobs, strict=True)
        lp = torch.tensor([value for row, its in known for value in compress(its, row.target_mask)])
        weighed = self._weigh(rows, lp)
        fault = not_finite(rows, weighed)
        if fault is not None:
            raise fault
        return float(weighed.sum())

    def _weigh(self, rows: Sequence[Datum], lp: Tensor) -> Tensor:
        """c·ℓ of the logprobs [N] of the rows' masked positions, [N]."""
        inputs = {name: flat_input(rows, name, lp) for name in rows[0].inputs}
        return self._loss(lp, inputs, self._call.config, _layout(rows, lp.device)) * _coefficients(rows, lp)


def not_finite(rows: Sequence[Datum], weighed: Tensor) -> Fatal | None:
    """Names the row of the first of [N] that is not."""
    bad = (~torch.isfinite(weighed.detach())).nonzero()
    if not len(bad):
        return None
    owner = [row.name for row in rows for _ in range(row.weighed * row.wide)]
    at = int(bad[0])
    return Fatal(f"row {owner[at]}: its loss is {weighed[at].item()}; no step was made")


def _coefficients(rows: Sequence[Datum], lp: Tensor) -> Tensor:
    values = [c for row in rows for c in compress(row.coefficients or _ones(row), row.target_mask)]
    return torch.tensor(values, dtype=lp.dtype, device=lp.device)


def _ones(row: Datum) -> tuple[float, ...]:
    return (1.0,) * len(row.target_mask)


def _layout(rows: Sequence[Datum], device: torch.device) -> Rows:
    counts = [row.weighed * row.wide for row in rows]
    owner = torch.tensor([number for number, count in enumerate(counts) for _ in range(count)], device=device)
    members: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        if row.pair:
            members.setdefault(row.pair, []).append(number)
    pairs = torch.tensor(list(members.values()), dtype=torch.long, device=device).reshape(-1, 2)
    return Rows(owner, len(rows), pairs)
