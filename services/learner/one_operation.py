"""One operation of one policy in its turn at the base: the slot in the right state, then the work.

In: a request with the name of the state that the work starts from. Out: its answer, or an error. Invariants: a slot
says what it holds only while that is true; in one turn a lost state is restored and the work done, so that whoever
gets a turn gets on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from services.learner import checkpoint
from services.learner.one_step import SlotLost, StepOutcome, StepRequest
from services.learner.slots import Slot, SlotShape, SlotTable
from services.learner.trainer import Trainer
from services.learner.turns import Check, both
from services.learner.works import Answer, BackwardKl, Place, Reference, Work
from shared.adapters.manifest import Probe
from shared.errors import MintError, Retryable

__all__ = ["NotRestored", "OperationOutcome", "OperationRequest", "TurnOutcome", "TurnRequest", "operate"]


@dataclass(frozen=True)
class OperationRequest:
    """`before` names the state that `work` starts from. `restore` brings the slot into it, works in order; none =
    the slot holds it."""

    policy: str
    shape: SlotShape
    origin: checkpoint.Origin
    before: str
    restore: Sequence[Work]
    work: Work
    check: Check

    def with_check(self, stopped: Check) -> OperationRequest:
        return replace(self, check=both(stopped, self.check))

    @property
    def slots(self) -> Iterator[tuple[str, SlotShape]]:
        """Those that it uses."""
        yield self.policy, self.shape
        for work in (*self.restore, self.work):
            if isinstance(work, BackwardKl):
                yield work.reference.key, work.reference.shape


@dataclass(frozen=True)
class OperationOutcome:
    """`changed`: the slot is in another state than before, which is nobody's to use until it has a name."""

    answer: Answer
    changed: bool
    slot: Slot
    turn: int


TurnRequest = StepRequest | OperationRequest
TurnOutcome = StepOutcome | OperationOutcome


class NotRestored(Retryable):
    """The state that the catalog names could not be brought back; the operation itself was not tried."""


def operate(
    request: OperationRequest,
    slots: SlotTable,
    trainer: Trainer,
    probe: Callable[[Slot, Check], Probe],
    noting: threading.Lock,
) -> OperationOutcome:
    """Blocks. Raises Fatal for what the operation asks for and cannot have, NotRestored, SlotLost, and what
    the request's check raises."""
    with ExitStack() as stack:
        slot = slots.acquire(request.policy, request.shape)
        stack.enter_context(slots.using([slot]))
        reference = partial(_reference, request, slots, trainer, stack)
        place = Place(slot, trainer, request.origin, request.check, probe, reference)
        with noting:
            held, slot.holds = slot.holds, None
            slot.turn += 1
            slot.replayable = True
        if request.restore:
            _restore(request, place)
        elif held != request.before:
            raise SlotLost(f"the slot of {request.policy} was given away before its turn")
        place.changed = False
        try:
            answer = request.work.run(place)
        finally:
            if not place.changed:
                with noting:
                    slot.holds = request.before
        return OperationOutcome(answer, place.changed, slot, slot.turn)


def _restore(request: OperationRequest, place: Place) -> None:
    for work in request.restore:
        try:
            work.run(place)
        except SlotLost:
            raise
        except MintError as error:
            request.check()  # a lost lease or a shutdown is not the state's fault
            raise NotRestored(f"the state of {request.policy} could not be restored: {error}") from error


def _reference(
    request: OperationRequest, slots: SlotTable, trainer: Trainer, stack: ExitStack, wanted: Reference
) -> Slot:
    if slots.capacity < 2:
        raise Retryable(
            f"{request.policy} is measured against a reference, which takes a second slot; this learner has 1; set "
            "MINT_LEARNER_SLOTS to 2 or more"
        )
    slot = slots.acquire(wanted.key, wanted.shape)
    stack.enter_context(slots.using([slot]))
    if wanted.files is not None:
        slot.holds = None
        trainer.load(slot, wanted.files, request.origin.base_sha256, fresh_optimizer=True)
        slot.holds = wanted.identity
    elif slot.holds != wanted.identity:
        raise SlotLost(f"the slot of the reference of {request.policy} was given away before its turn")
    return slot
