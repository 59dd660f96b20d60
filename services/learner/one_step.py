"""One optimizer step of one policy: prepare its slot, learn, and write down what came of it.

In: the command with its files and rows. Out: the training checkpoint's files and metrics, or an error.
Invariant: the three parts are called in order, and after an error none of them does anything more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from mint_schemas.commands import UpdateRequested
from mint_schemas.training import Grpo, Lora

from services.learner import checkpoint, old_logprobs
from services.learner.datum import Datum
from services.learner.optimizer import AdamParams
from services.learner.recipe import StepRows
from services.learner.schedule import learning_rate
from services.learner.slots import Slot, SlotShape, SlotTable
from services.learner.trainer import ForwardBackward, Trainer
from services.learner.turns import Check, both
from shared.adapters.layout import canonical_json
from shared.adapters.manifest import Probe
from shared.bases import Base
from shared.errors import Fatal, Retryable
from shared.rl.checkpoint import ADAPTER_FILE, OLD_LOGPROBS_FILE, PROBE_FILE
from shared.rl.seeds import derive_seed
from shared.telemetry.metrics import STEP_PART_SECONDS

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class StepRequest:
    """`start`: files of the checkpoint to go on from, None = the slot holds it, or the command starts
    afresh. `reference`: likewise of the adapter that the step measures its distance from.
    `old_logprobs`: that file of the checkpoint, for the later steps of a record."""

    command: UpdateRequested
    start: Files | None
    reference: Files | None
    old_logprobs: bytes | None
    rows: StepRows
    check: Check

    def with_check(self, stopped: Check) -> StepRequest:
        return replace(self, check=both(stopped, self.check))


@dataclass(frozen=True)
class StepOutcome:
    """`files` by name; `adapter_changed` compares bytes with the start's; `slot` and its `turn` say where
    the result still is."""

    files: Files
    adapter_changed: bool
    skipped: bool
    metrics: dict[str, float]
    slot: Slot
    turn: int


class SlotLost(Retryable):
    """What a slot held when the step was asked for is gone; ask again, with the files."""


class OneStep:
    """`stack` keeps the slots from being evicted until it is left; under `noting` slots say what they hold."""

    def __init__(
        self,
        request: StepRequest,
        base: Base,
        slots: SlotTable,
        trainer: Trainer,
        stack: ExitStack,
        noting: threading.Lock,
    ) -> None:
        self.request, self.rows = request, request.rows
        self.error: Exception | None = None
        self._base, self._slots, self._trainer, self._stack = base, slots, trainer, stack
        self._noting = noting
        self._slot: Slot | None = None
        self._old: dict[str, list[float]] | None = None
        self._before = b""
        self._metrics: dict[str, float] = dict(request.rows.metrics)
        self._outcome: StepOutcome | None = None

    @property
    def slot(self) -> Slot:
        if self._slot is None:
            raise RuntimeError("the step was not prepared")
        return self._slot

    def attempt(self, part: Callable[[], None]) -> None:
        """Do a part, unless one before failed; this one's failure is kept."""
        if self.error is None:
            try:
                part()
            except Exception as error:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        self.error = error
        if self._slot is not None:
            self._slot.forget_gradients()

    def answer(self) -> StepOutcome | Exception:
        if self.error is not None:
            return self.error
        if self._outcome is None:
            return RuntimeError("the step was not finished")
        return self._outcome

    def prepare(self) -> None:
        command = self.request.command
        with STEP_PART_SECONDS.labels("restore").time():
            self._slot = self._take(command.policy)
            with self._noting:
                held, self._slot.holds = self._slot.holds, None
                self._slot.turn += 1
            if self.request.start is not None:
                self._trainer.load(self._slot, self.request.start, self._base.sha256, command.fresh_optimizer)
            elif command.start is None:
                self._slot.initialise(derive_seed(command.seed, "adapter-init"))
            elif held != checkpoint.identity(command.start):
                raise SlotLost(f"the slot of {command.policy} was given away before its turn")
            self._before = checkpoint.adapter_bytes(self._slot)
        with STEP_PART_SECONDS.labels("reference").time():
            self._attach_reference()
            self._attach_old_logprobs()

    def learn(self, result: ForwardBackward) -> None:
        command = self.request.command
        optimizer = command.method.optimizer
        rate = learning_rate(optimizer, command.step, command.steps)
        params = AdamParams(
            learning_rate=rate,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            grad_clip_norm=optimizer.grad_clip_norm,
        )
        with STEP_PART_SECONDS.labels("optimizer").time():
            norm = self._trainer.optim_step(self.slot, params)
        self._metrics |= self.rows.report(self.rows.data, result.logprobs)
        self._metrics |= {
            "loss": result.loss,
            "grad_norm": norm,
            "tokens": float(result.tokens),
            "learning_rate": rate,
            "optimizer_step": float(self.slot.optimizer.step_count),
        }

    def finish(self, probe: Callable[[Slot, Check], Probe]) -> None:
        command, slot = self.request.command, self.slot
        origin = checkpoint.Origin(command.policy, command.run_id, self._base.name, self._base.sha256, command.seed)
        with STEP_PART_SECONDS.labels("write").time():
            files = self._trainer.save(slot, origin, command.step)
            changed = files[ADAPTER_FILE] != self._before
            _refuse_silent_step(command, self._metrics, changed)
            if self._old is not None and not _ends_record(command):
                files[OLD_LOGPROBS_FILE] = old_logprobs.dump(self.rows.record, self._old)
            if command.export:
                files[PROBE_FILE] = canonical_json(probe(slot, self.request.check).model_dump(mode="json"))
        self._outcome = StepOutcome(files, changed, not self.rows.data, self._metrics, slot, slot.turn)

    def _take(self, key: str) -> Slot:
        slot = self._slots.acquire(key, shape_of(self.request.command))
        self._stack.enter_context(self._slots.using([slot]))
        return slot

    def _attach_reference(self) -> None:
        if not self.rows.reference or not self.rows.data:
            return
        slot = self._reference_slot()
        call, data = self.rows.call, self.rows.data
        found = self._trainer.forward(slot, data, call.temperature, self.request.check)
        self._use([row.with_input("ref_logprobs", lp) for row, lp in zip(data, found, strict=True)])

    def _reference_slot(self) -> Slot | None:
        """None = the base, adapter off."""
        command = self.request.command
        if command.reference is None:
            return None
        if self._slots.capacity < 2:
            raise Fatal(
                f"a step of {command.policy} needs 2 slots, one of them for the reference that it is measured "
                f"against; this learner has 1; set MINT_LEARNER_SLOTS to 2 or more"
            )
        slot = self._take(reference_key(command))
        if self.request.reference is not None:
            slot.holds = None
            self._trainer.load(slot, self.request.reference, self._base.sha256, fresh_optimizer=True)
            slot.holds = checkpoint.identity(command.reference)
        elif slot.holds != checkpoint.identity(command.reference):
            raise SlotLost(f"the slot of the reference of {command.policy} was given away before its turn")
        return slot

    def _attach_old_logprobs(self) -> None:
        """Computed before the record's first step, read back before the others; a step whose own minibatch is
        empty hands them on."""
        record = self.rows.record
        if not record:
            return
        command = self.request.command
        if (command.epoch, command.minibatch) == (0, 0):
            found = self._trainer.forward(self.slot, record, self.rows.call.temperature, self.request.check)
            old = {row.name: lp for row, lp in zip(record, found, strict=True)}
        else:
            old = old_logprobs.load(record, self.request.old_logprobs)
        self._old = old
        self._use([row.with_input("old_logprobs", old[row.name]) for row in self.rows.data])

    def _use(self, data: Sequence[Datum]) -> None:
        self.rows = replace(self.rows, data=data)


def shape_of(command: UpdateRequested) -> SlotShape:
    return shape_of_lora(command.lora)


def shape_of_lora(lora: Lora) -> SlotShape:
    return SlotShape(lora.rank, lora.alpha, lora.use_rslora, tuple(sorted(lora.target_modules)))


def reference_key(command: UpdateRequested) -> str:
    return reference_of(command.policy)


def reference_of(policy: str) -> str:
    """Under which the slot of the policy's reference is found; no policy is named like this."""
    return f"{policy} (reference)"


def _ends_record(command: UpdateRequested) -> bool:
    method = command.method
    if not isinstance(method, Grpo):
        return True
    return (command.epoch, command.minibatch) == (method.epochs - 1, method.minibatches - 1)


def _refuse_silent_step(command: UpdateRequested, metrics: Mapping[str, float], changed: bool) -> None:
    if changed or "grad_norm" not in metrics:
        return
    if metrics["learning_rate"] > 0 and metrics["grad_norm"] > 0:
        raise Fatal(
            f"{command.policy}, step {command.step}: learning rate {metrics['learning_rate']} and gradient norm "
            f"{metrics['grad_norm']}, yet no byte of the adapter changed; the step would be lost in rounding"
        )
