"""One backward pass for several policies: each row through its own adapter, each gradient into its own slot.

In: what each policy wants computed. Out: its loss, its values per row and its gradients, or what went
wrong with it. Invariant: what goes wrong with one part changes nothing of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from services.learner.batch import Batch, Share, plan_batches
from services.learner.datum import Datum
from services.learner.passes import Passes
from services.learner.peers import Peers
from services.learner.slots import Slot
from shared.errors import MintError

Check = Callable[[], None]


@dataclass(frozen=True)
class Weighed:
    """A micro-batch's loss, as it enters the step's sum; `values` by row; `fault` = it is not finite, and why."""

    loss: Tensor
    values: list[list[float]]
    fault: MintError | None = None


class Head(Protocol):
    def __call__(self, indices: Sequence[int], rows: Sequence[Datum], logits: Tensor) -> Weighed:
        """`logits` [N, vocabulary] at the masked positions of `rows`, which are `indices` of the data."""
        ...


@dataclass
class Part:
    """One policy's part: what to compute, and what came of it so far.

    `losses` by batch and `values` by row; `summed` [n] its gradients. `stopped` ends it at once in every
    process; `fault` is only known where it happened, until the end."""

    slot: Slot
    data: Sequence[Datum]
    head: Head
    check: Check
    losses: dict[int, float] = field(default_factory=dict)
    values: dict[int, list[float]] = field(default_factory=dict)
    stopped: MintError | None = None
    fault: MintError | None = None

    def __post_init__(self) -> None:
        # summed apart, so that a part that fails half way leaves the slot's gradients as they were
        self.summed = torch.zeros_like(self.slot.flat, requires_grad=False)

    @property
    def error(self) -> MintError | None:
        return self.stopped or self.fault

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        at = 0
        for parameter, gradient in zip(self.slot.parameters.values(), gradients, strict=True):
            if gradient is not None:
                self.summed[at : at + parameter.numel()].add_(gradient.flatten())
            at += parameter.numel()


def backward_jointly(passes: Passes, peers: Peers, parts: Sequence[Part], max_tokens: int) -> None:
    """Fills `losses`, `values` and errors; a part without an error has its gradients added to its slot's."""
    batches = plan_batches([Share(part.data, part.slot.span) for part in parts], max_tokens, passes.padded)
    for (number, batch), counts in peers.share(list(enumerate(batches))):
        _ask(peers, parts)
        if all(part.stopped for part in parts):
            break
        _backward(passes, batch, parts, number if counts else None)
    for part in parts:
        peers.sum_(part.summed)
        part.losses, part.values = peers.merge(part.losses), peers.merge(part.values)
        part.fault = peers.first(part.fault)
        if part.error is None:
            part.slot.accumulate(part.summed)


def _ask(peers: Peers, parts: Sequence[Part]) -> None:
    """A part that is stopped stays in its batches, so that the others' shapes do not change."""
    for part in parts:
        if part.stopped is None:
            try:
                peers.check(part.check)
            except MintError as error:
                part.stopped = error


def _backward(passes: Passes, batch: Batch, parts: Sequence[Part], number: int | None) -> None:
    """`number` None: computed for the company of the other processes only."""
    taking = [parts[it.share] for it in batch.parts]
    logits = passes.logits(batch)
    weighed = [part.head(it.indices, it.rows, its) for part, it, its in zip(taking, batch.parts, logits, strict=True)]
    leaves = [leaf for part in taking for leaf in part.slot.parameters.values()]
    total = torch.stack([it.loss for it in weighed]).sum()
    gradients = iter(torch.autograd.grad(total, leaves, allow_unused=True))
    if number is None:
        return
    for part, it, result in zip(taking, batch.parts, weighed, strict=True):
        part.add([next(gradients) for _ in part.slot.parameters])
        part.losses[number] = float(result.loss.detach())
        part.values |= dict(zip(it.indices, result.values, strict=True))
        part.fault = part.fault or result.fault
