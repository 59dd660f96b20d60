"""One base model with everything that trains policies on it, and the blocking part of their turns.

`Workbench.steps` runs in a thread: files and rows of one step, of several policies' steps or of one operation in,
files and figures out. Invariant: a slot says what it holds only while that is true; a step that fails leaves
it saying nothing, so that the next one restores.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, cast

from mint_schemas.commands import UpdateRequested

from services.learner import checkpoint
from services.learner.base_model import ResidentBase
from services.learner.datum import Datum, cost
from services.learner.one_operation import OperationOutcome, OperationRequest, TurnOutcome, TurnRequest, operate
from services.learner.one_step import OneStep, StepOutcome, StepRequest, reference_key, shape_of
from services.learner.slots import Slot, SlotShape, SlotTable
from services.learner.trainer import ForwardBackward, Trainer, Work
from services.learner.turns import Check, Turns
from shared.adapters.manifest import Probe
from shared.bases import Base
from shared.telemetry.metrics import STEP_PART_SECONDS, TURN_WAIT_SECONDS
from shared.text.codec import TextCodec

PROBE_TEXT = "The quick brown fox jumps over the lazy dog. 12 + 34 = 46, and water boils at 100 degrees."


@dataclass(frozen=True)
class Schedule:
    """`sliced`: one policy's step a turn, its bytes a function of its command alone. `batched`: as many as
    have slots. `auto`: those that together have at most `joint_tokens` tokens."""

    kind: Literal["auto", "sliced", "batched"] = "sliced"
    joint_tokens: int = 1024


class Placed(Protocol):
    """Where a turn's result still is."""

    @property
    def slot(self) -> Slot: ...
    @property
    def turn(self) -> int: ...


class Workbench:
    """`turns` is taken by whoever needs the base: slots share one."""

    tries_apart = True

    def __init__(
        self,
        base: Base,
        resident: ResidentBase,
        slots: SlotTable,
        trainer: Trainer,
        codec: TextCodec,
        schedule: Schedule | None = None,
    ) -> None:
        self.base, self.codec = base, codec
        self._resident, self._slots, self._trainer = resident, slots, trainer
        self._schedule = schedule or Schedule()
        self.noting = threading.Lock()
        waited = TURN_WAIT_SECONDS.labels(base.token).observe
        self.turns: Turns[TurnRequest, TurnOutcome] = Turns(self.steps, self._together, waited)

    async def step(self, request: StepRequest, first: bool = False) -> StepOutcome:
        """The outcome of its turn (see `Turns.take`)."""
        return cast(StepOutcome, await self.turns.take(request, first))

    async def operate(self, request: OperationRequest, first: bool = False) -> OperationOutcome:
        """The outcome of its turn."""
        return cast(OperationOutcome, await self.turns.take(request, first))

    def holds(self, command: UpdateRequested) -> bool:
        """Whether the policy's slot is in the state that the command starts from, optimizer included."""
        if command.start is None or command.fresh_optimizer:
            return False
        return self.state_of(command.policy, shape_of(command)) == checkpoint.identity(command.start)

    def holds_reference(self, command: UpdateRequested) -> bool:
        """Whether the adapter that the command measures its distance from is in a slot (None always is)."""
        if command.reference is None:
            return True
        return self.state_of(reference_key(command), shape_of(command)) == checkpoint.identity(command.reference)

    def state_of(self, key: str, shape: SlotShape) -> str | None:
        """What the slot of `key` holds; None = nothing, or nobody knows."""
        slot = self._slots.find(key, shape)
        return None if slot is None else slot.holds

    def holding(self, policy: str) -> str | None:
        """As `state_of`, where the shape is not known yet."""
        return self._slots.holding(policy)

    def steps(self, requests: Sequence[TurnRequest]) -> list[TurnOutcome | Exception]:
        """One operation, or one optimizer step each, their passes over the base joint; what fails is answered
        by its error."""
        if isinstance(requests[0], OperationRequest):
            return [self._operate(requests[0])]
        steps = [request for request in requests if isinstance(request, StepRequest)]
        return list(self._step_jointly(steps))

    def _operate(self, request: OperationRequest) -> OperationOutcome | Exception:
        try:
            return operate(request, self._slots, self._trainer, self._probe, self.noting)
        except Exception as error:
            return error

    def _step_jointly(self, requests: Sequence[StepRequest]) -> list[StepOutcome | Exception]:
        with ExitStack() as stack:
            steps = [
                OneStep(request, self.base, self._slots, self._trainer, stack, self.noting) for request in requests
            ]
            for step in steps:
                step.attempt(step.prepare)
            learning = [step for step in steps if step.error is None and step.rows.data]
            if learning:
                self._learn(learning)
            for step in steps:
                step.attempt(lambda step=step: step.finish(self._probe))  # type: ignore[misc]
            return [step.answer() for step in steps]

    def keep(self, outcome: Placed, holds: str) -> None:
        """Note which state the turn's slot holds, if it has not moved on since; one that was not committed
        matches no later start."""
        with self.noting:
            if outcome.slot.turn == outcome.turn:
                outcome.slot.holds = holds

    def _learn(self, steps: Sequence[OneStep]) -> None:
        works = [Work(step.slot, step.rows.data, step.rows.call, step.request.check) for step in steps]
        try:
            with STEP_PART_SECONDS.labels("forward_backward").time():
                answers = self._trainer.forward_backward_batch(works)
        except Exception as error:
            self._learn_apart(steps, error)
            return
        for step, answer in zip(steps, answers, strict=True):
            if isinstance(answer, ForwardBackward):
                step.attempt(lambda step=step, answer=answer: step.learn(answer))  # type: ignore[misc]
            else:
                step.fail(answer)

    def _learn_apart(self, steps: Sequence[OneStep], error: Exception) -> None:
        """A joint pass met what is no step's own (memory, say): each of them again, alone, so that the one
        that brings it about is the one that fails."""
        if len(steps) == 1 or not self.tries_apart:
            for step in steps:
                step.fail(error)
            return
        for step in steps:
            step.slot.forget_gradients()
            self._learn([step])

    def _together(self, taken: Sequence[TurnRequest], following: TurnRequest) -> bool:
        everyone = [request for request in (*taken, following) if isinstance(request, StepRequest)]
        if self._schedule.kind == "sliced" or len(everyone) < len(taken) + 1:
            return False
        if len({request.command.policy for request in everyone}) < len(everyone):
            return False
        # a step takes a slot, and one for its reference
        if sum(1 + (request.command.reference is not None) for request in everyone) > self._slots.capacity:
            return False
        if self._schedule.kind == "batched":
            return True
        rows = [row for request in everyone for row in request.rows.data]
        return not rows or cost(rows, padded=not self._resident.packing) <= self._schedule.joint_tokens

    def _probe(self, slot: Slot, check: Check) -> Probe:
        ids = tuple(self.codec.encode(PROBE_TEXT))
        datum = Datum("probe", ids[:-1], ids[1:], (True,) * (len(ids) - 1))
        (logprobs,) = self._trainer.forward(slot, [datum], 1.0, check)
        return Probe(prompt=ids, logprobs=tuple(logprobs), dtype=self._probe_dtype)

    @cached_property
    def _probe_dtype(self) -> str:
        return "bfloat16" if self._resident.precision == "bfloat16" else "float32"
