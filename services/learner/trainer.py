"""The training primitives on a slot: forward, forward_backward, optim_step, save, load.

Datums go in; losses, logprobs and changed adapters come out. Every recipe and every outside interface
uses these and nothing beside them. Invariant: a primitive changes its own slot only, and what it
computes does not depend on the micro-batches that it was cut into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Protocol

import torch
from torch import Tensor

from services.learner.base_model import ResidentBase
from services.learner.datum import Datum, check_datums, micro_batches
from services.learner.losses import Loss, loss_named
from services.learner.optimizer import AdamParams, clip_gradients
from services.learner.slots import Slot, SlotTable
from services.learner.turns import Check
from shared.errors import Fatal


@dataclass(frozen=True)
class LossCall:
    """A loss by name, its settings, and the temperature that logits are divided by."""

    name: str
    config: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 1.0


@dataclass(frozen=True)
class ForwardBackward:
    """`loss` = Σ c·ℓ over the call's rows. `logprobs[d]` has the length of datum d, 0.0 outside its mask."""

    loss: float
    logprobs: list[list[float]]
    tokens: int


class Trainer(Protocol):
    """`check` is called between micro-batches; what it raises ends the call."""

    def forward(self, slot: Slot, data: Sequence[Datum], temperature: float, check: Check) -> list[list[float]]: ...

    def forward_backward(self, slot: Slot, data: Sequence[Datum], call: LossCall, check: Check) -> ForwardBackward:
        """Adds the gradients of the loss to the slot's. Raises Fatal for a bad row or a loss that is not finite."""
        ...

    def optim_step(self, slot: Slot, params: AdamParams) -> float:
        """One AdamW step from the accumulated gradients, which it clears. Returns their norm before
        clipping. Raises Fatal when there are none or the norm is not finite; the adapter is then unchanged."""
        ...


class TorchTrainer:
    """One process, one device. `max_tokens` bounds the padded tokens of a micro-batch."""

    def __init__(self, base: ResidentBase, slots: SlotTable, max_tokens: int) -> None:
        self._base, self._slots, self._max_tokens = base, slots, max_tokens

    @torch.no_grad()
    def forward(self, slot: Slot, data: Sequence[Datum], temperature: float, check: Check) -> list[list[float]]:
        check_datums(data, frozenset(), self._base.vocab_size, self._base.max_context)
        logprobs = _Scatter(data)
        for batch in micro_batches(data, self._max_tokens):
            check()
            rows = [data[i] for i in batch]
            logprobs.put(batch, self._logprobs(slot, rows, temperature))
        return logprobs.rows

    def forward_backward(self, slot: Slot, data: Sequence[Datum], call: LossCall, check: Check) -> ForwardBackward:
        loss = loss_named(call.name, call.config)
        check_datums(data, loss.needs, self._base.vocab_size, self._base.max_context)
        parameters = list(slot.parameters.values())
        # summed apart, so that a call that fails half way leaves the slot's gradients as they were
        summed = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
        logprobs, total = _Scatter(data), 0.0
        for batch in micro_batches(data, self._max_tokens):
            check()
            rows = [data[i] for i in batch]
            lp = self._logprobs(slot, rows, call.temperature)
            losses = _weighed_losses(rows, lp, loss, call.config)
            gradients = torch.autograd.grad(losses.sum(), parameters, allow_unused=True, materialize_grads=True)
            for into, gradient in zip(summed, gradients, strict=True):
                into.add_(gradient)
            logprobs.put(batch, lp.detach())
            total += float(losses.detach().double().sum())
        slot.accumulate(dict(zip(slot.parameters, summed, strict=True)))
        return ForwardBackward(total, logprobs.rows, sum(len(datum.input_ids) for datum in data))

    def optim_step(self, slot: Slot, params: AdamParams) -> float:
        if slot.gradients is None:
            raise Fatal(f"{slot.policy}: an optimizer step needs a forward_backward before it")
        gradients, slot.gradients = slot.gradients, None
        norm = clip_gradients(gradients, params.grad_clip_norm)
        if not norm < float("inf"):
            raise Fatal(f"{slot.policy}: the gradient norm is {norm}; lower the learning rate or look at the rows")
        slot.optimizer.step(gradients, params)
        return norm

    def _logprobs(self, slot: Slot, rows: Sequence[Datum], temperature: float) -> Tensor:
        """log softmax(logits / T)[target] [N] of the rows' masked positions, row by row, in fp32 or better."""
        module = self._slots.activate(slot)
        masks = _pad([datum.mask for datum in rows], torch.bool)
        columns = masks.any(dim=0).nonzero().squeeze(1)
        # padding stands on the right, so a causal base never attends to it from a position that counts
        ids = _pad([datum.input_ids for datum in rows], torch.long).to(self._base.device)
        with self._base.autocast():
            logits = module(input_ids=ids, logits_to_keep=columns.to(self._base.device), use_cache=False).logits
        targets = _pad([datum.targets for datum in rows], torch.long)
        kept = masks[:, columns].to(self._base.device)
        chosen = logits[kept]
        scaled = chosen.to(torch.promote_types(chosen.dtype, torch.float32)) / temperature
        wanted = targets[:, columns].to(self._base.device)[kept]
        return -torch.nn.functional.cross_entropy(scaled, wanted, reduction="none")


def _weighed_losses(rows: Sequence[Datum], lp: Tensor, loss: Loss, config: Mapping[str, float]) -> Tensor:
    """c·ℓ of the masked positions [N]. Raises Fatal naming the row where it is not finite."""
    inputs = {name: _flat([datum.inputs[name] for datum in rows], rows, lp) for name in rows[0].inputs}
    weighed = loss(lp, inputs, config)
    weighed = weighed * _flat([datum.coefficients or (1.0,) * len(datum.mask) for datum in rows], rows, lp)
    if not bool(torch.isfinite(weighed).all()):
        owner = [datum.name for datum in rows for _ in range(datum.weighed)]
        bad = int((~torch.isfinite(weighed)).nonzero()[0])
        raise Fatal(f"row {owner[bad]}: its loss is {weighed[bad].item()}; no step was made")
    return weighed


class _Scatter:
    """Flat logprobs of micro-batches back into rows of the datums' lengths and order."""

    def __init__(self, data: Sequence[Datum]) -> None:
        self._data = data
        self.rows: list[list[float]] = [[] for _ in data]

    def put(self, batch: Sequence[int], flat: Tensor) -> None:
        values = iter(flat.tolist())
        for index in batch:
            self.rows[index] = [next(values) if taken else 0.0 for taken in self._data[index].mask]


def _pad(rows: Sequence[Sequence[int | bool]], dtype: torch.dtype) -> Tensor:
    """[R, longest], zeros on the right."""
    padded = torch.zeros((len(rows), max(len(row) for row in rows)), dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded


def _flat(arrays: Sequence[Sequence[float]], rows: Sequence[Datum], like: Tensor) -> Tensor:
    """The masked entries of each row's array, one after another [N]."""
    values = [v for array, datum in zip(arrays, rows, strict=True) for v in compress(array, datum.mask)]
    return torch.tensor(values, dtype=like.dtype, device=like.device)
