"""The training primitives on a slot: forward, forward_backward, optim_step, save, load.

Datums go in; losses, logprobs and changed adapters come out. Every recipe and every outside interface
uses these and nothing beside them. Invariant: a primitive changes its own slot only, and what it
computes does not depend on the micro-batches that it was cut into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.learner import checkpoint
from services.learner.base_model import ResidentBase
from services.learner.batch import Share, plan_batches
from services.learner.datum import Datum, check_datums, units
from services.learner.heads import LossCall, LossHead
from services.learner.joint import Check, Part, backward_jointly
from services.learner.logprobs import target_logprobs
from services.learner.optimizer import AdamParams, clip_gradients
from services.learner.passes import Passes, by_row, targets_of
from services.learner.peers import Alone, Peers
from services.learner.reverse_kl import KlRow, ReverseKl, ReverseKlHead, check_rows
from services.learner.slots import Slot
from shared.errors import Fatal, MintError

__all__ = ["Check", "ForwardBackward", "LossCall", "TorchTrainer", "Trainer", "Work"]


@dataclass(frozen=True)
class ForwardBackward:
    """`loss` = Σ c·ℓ over the call's rows. `logprobs[d]` has the length of datum d's targets, 0.0 outside its
    mask."""

    loss: float
    logprobs: list[list[float]]
    tokens: int


@dataclass(frozen=True)
class Work:
    """One policy's part of a joint forward_backward. `check` is called between micro-batches; what it
    raises ends this part and no other."""

    slot: Slot
    data: Sequence[Datum]
    call: LossCall
    check: Check


class Trainer(Protocol):
    """`check` is called between micro-batches; what it raises ends the call."""

    def forward(self, slot: Slot | None, data: Sequence[Datum], temperature: float, check: Check) -> list[list[float]]:
        """Logprobs of the targets at logits / `temperature`; slot None = the base, adapter off."""
        ...

    def forward_backward(self, slot: Slot, data: Sequence[Datum], call: LossCall, check: Check) -> ForwardBackward:
        """Adds the gradients of the loss to the slot's. Raises Fatal for a bad row or a loss that is not finite."""
        ...

    def forward_backward_batch(self, works: Sequence[Work]) -> list[ForwardBackward | MintError]:
        """Several policies' forward_backward in joint passes over the base, gradients apart. What goes
        wrong with one is its answer; the others are as if it had not been there."""
        ...

    def reverse_kl(
        self, slot: Slot, reference: Slot | None, rows: Sequence[KlRow], temperature: float, check: Check
    ) -> ReverseKl:
        """Adds the gradients of the reverse KL to the slot's. Raises like `forward_backward`."""
        ...

    def optim_step(self, slot: Slot, params: AdamParams) -> float:
        """One AdamW step from the accumulated gradients, which it clears. Returns their norm before
        clipping. Raises Fatal when there are none or the norm is not finite; the adapter is then unchanged."""
        ...

    def save(self, slot: Slot, origin: checkpoint.Origin, step: int) -> dict[str, bytes]:
        """The files of a training checkpoint."""
        ...

    def load(self, slot: Slot, files: Mapping[str, bytes], base_sha256: str, fresh_optimizer: bool) -> None:
        """Put the slot into a training checkpoint's state. Raises Fatal, before anything is changed, for
        files that do not fit."""
        ...


class TorchTrainer:
    """`max_tokens` bounds the tokens of a micro-batch; `peers` are the other processes that hold the base."""

    def __init__(self, base: ResidentBase, max_tokens: int, peers: Peers | None = None) -> None:
        self._base, self._max_tokens, self._peers = base, max_tokens, peers or Alone()
        self._passes = Passes(base)

    @torch.no_grad()
    def forward(self, slot: Slot | None, data: Sequence[Datum], temperature: float, check: Check) -> list[list[float]]:
        self._check_rows(data, frozenset())
        share = Share(data, slot.span if slot else None)
        found: dict[int, list[float]] = {}
        for batch, counts in self._peers.share(plan_batches([share], self._max_tokens, self._passes.padded)):
            self._peers.check(check)
            (logits,) = self._passes.logits(batch)
            if counts:
                lp = target_logprobs(logits, targets_of(batch.rows, logits.device), temperature)
                found |= dict(zip(batch.parts[0].indices, by_row(batch.rows, lp), strict=True))
        found = self._peers.merge(found)
        return [found[index] for index in range(len(data))]

    def forward_backward(self, slot: Slot, data: Sequence[Datum], call: LossCall, check: Check) -> ForwardBackward:
        (answer,) = self.forward_backward_batch([Work(slot, data, call, check)])
        if isinstance(answer, MintError):
            raise answer
        return answer

    def forward_backward_batch(self, works: Sequence[Work]) -> list[ForwardBackward | MintError]:
        prepared = [self._prepare(work) for work in works]
        parts = [part for part in prepared if isinstance(part, Part)]
        if parts:
            backward_jointly(self._passes, self._peers, parts, self._max_tokens)
        return [_answer(part) if isinstance(part, Part) else part for part in prepared]

    def reverse_kl(
        self, slot: Slot, reference: Slot | None, rows: Sequence[KlRow], temperature: float, check: Check
    ) -> ReverseKl:
        check_rows(rows, self._base.vocab_size, self._base.max_context)
        head = ReverseKlHead(self._passes, reference, rows, temperature)
        part = Part(slot, [row.student() for row in rows], head, check)
        backward_jointly(self._passes, self._peers, [part], self._max_tokens)
        if part.error is not None:
            raise part.error
        return ReverseKl(sum(part.losses.values()), [sum(part.values[index]) for index in range(len(rows))])

    def optim_step(self, slot: Slot, params: AdamParams) -> float:
        if not slot.accumulated:
            raise Fatal(f"{slot.policy}: an optimizer step needs a forward_backward before it")
        slot.forget_gradients()
        norm = clip_gradients(slot.flat_gradients, params.grad_clip_norm)
        if not norm < float("inf"):
            raise Fatal(f"{slot.policy}: the gradient norm is {norm}; lower the learning rate or look at the rows")
        slot.optimizer.step(slot.flat_gradients, params)
        return norm

    def save(self, slot: Slot, origin: checkpoint.Origin, step: int) -> dict[str, bytes]:
        return checkpoint.dump(slot, origin, step)

    def load(self, slot: Slot, files: Mapping[str, bytes], base_sha256: str, fresh_optimizer: bool) -> None:
        checkpoint.restore(slot, files, base_sha256, fresh_optimizer)

    def _prepare(self, work: Work) -> Part | MintError:
        try:
            head = LossHead(work.call)
            self._check_rows(work.data, head.needs)
            units(work.data)
            head.check_pairs(work.data)
        except MintError as error:
            return error
        return Part(work.slot, work.data, head, work.check)

    def _check_rows(self, data: Sequence[Datum], needs: frozenset[str]) -> None:
        check_datums(data, needs, self._base.vocab_size, self._base.max_context)


def _answer(part: Part) -> ForwardBackward | MintError:
    if part.error is not None:
        return part.error
    values = [part.values[index] for index in range(len(part.data))]
    return ForwardBackward(sum(part.losses.values()), values, sum(len(datum.input_ids) for datum in part.data))
