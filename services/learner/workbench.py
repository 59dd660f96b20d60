"""One base model with everything that trains policies on it, and the blocking part of one step.

`Workbench.step` runs in a thread: files and rows in, files and metrics out. Invariant: a slot says what
it holds only while that is true; a step that fails leaves it saying nothing, so that the next one restores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mint_schemas.commands import UpdateRequested

from services.learner import checkpoint
from services.learner.base_model import ResidentBase
from services.learner.datum import Datum
from services.learner.grpo import mismatch
from services.learner.optimizer import AdamParams
from services.learner.recipe import StepRows
from services.learner.slots import Slot, SlotShape, SlotTable
from services.learner.trainer import Trainer
from services.learner.turns import Check, Turns
from shared.adapters.layout import canonical_json
from shared.adapters.manifest import Probe
from shared.bases import Base
from shared.errors import Fatal
from shared.rl.checkpoint import ADAPTER_FILE, PROBE_FILE
from shared.rl.seeds import derive_seed
from shared.text.codec import TextCodec

PROBE_TEXT = "The quick brown fox jumps over the lazy dog. 12 + 34 = 46, and water boils at 100 degrees."


@dataclass(frozen=True)
class StepOutcome:
    """`files` by name; `adapter_changed` compares bytes with the start's."""

    files: Mapping[str, bytes]
    adapter_changed: bool
    skipped: bool
    metrics: dict[str, float]


class Workbench:
    """`turns` is taken by whoever steps: slots share one resident base."""

    def __init__(
        self, base: Base, resident: ResidentBase, slots: SlotTable, trainer: Trainer, codec: TextCodec
    ) -> None:
        self.base, self.codec = base, codec
        self._resident, self._slots, self._trainer = resident, slots, trainer
        self.turns = Turns()

    def holds(self, command: UpdateRequested) -> bool:
        """Whether the policy's slot is in the state that the command starts from, optimizer included."""
        if command.start is None or command.fresh_optimizer:
            return False
        slot = self._slots.find(command.policy, _shape(command))
        return slot is not None and slot.holds == checkpoint.identity(command.start)

    def step(
        self, command: UpdateRequested, start: Mapping[str, bytes] | None, rows: StepRows, check: Check
    ) -> StepOutcome:
        """One optimizer step from `start` (None = the slot holds it, or the command starts afresh)."""
        slot = self._slots.acquire(command.policy, _shape(command))
        slot.holds = None
        try:
            self._prepare(slot, command, start)
            before = checkpoint.adapter_bytes(slot)
            metrics = self._train(slot, command, rows, check) if rows.data else {}
            files = checkpoint.dump(slot, self._origin(command), command.step)
            changed = files[ADAPTER_FILE] != before
            _refuse_silent_step(command, metrics, changed)
            if command.export:
                files[PROBE_FILE] = canonical_json(self._probe(slot, check).model_dump(mode="json"))
        except BaseException:
            slot.gradients = None
            raise
        return StepOutcome(files, changed, not rows.data, rows.metrics | metrics)

    def keep(self, command: UpdateRequested, holds: str) -> None:
        """Note which checkpoint the slot now holds; one that was not committed matches no later start."""
        self._slots.acquire(command.policy, _shape(command)).holds = holds

    def _prepare(self, slot: Slot, command: UpdateRequested, start: Mapping[str, bytes] | None) -> None:
        if start is not None:
            checkpoint.restore(slot, start, self.base.sha256, command.fresh_optimizer)
        elif command.start is None:
            slot.initialise(derive_seed(command.seed, "adapter-init"))

    def _train(self, slot: Slot, command: UpdateRequested, rows: StepRows, check: Check) -> dict[str, float]:
        optimizer = command.method.optimizer
        result = self._trainer.forward_backward(slot, rows.data, rows.call, check)
        check()
        norm = self._trainer.optim_step(slot, AdamParams(**optimizer.model_dump()))
        metrics = {
            "loss": result.loss,
            "grad_norm": norm,
            "tokens": float(result.tokens),
            "learning_rate": optimizer.learning_rate,
            "optimizer_step": float(slot.optimizer.step_count),
        }
        return metrics | (mismatch(rows.data, result.logprobs) if command.method.kind == "grpo" else {})

    def _probe(self, slot: Slot, check: Check) -> Probe:
        ids = tuple(self.codec.encode(PROBE_TEXT))
        datum = Datum("probe", ids[:-1], ids[1:], (True,) * (len(ids) - 1))
        (logprobs,) = self._trainer.forward(slot, [datum], 1.0, check)
        return Probe(prompt=ids, logprobs=tuple(logprobs), dtype=self._probe_dtype)

    @cached_property
    def _probe_dtype(self) -> str:
        return "bfloat16" if self._resident.precision == "bfloat16" else "float32"

    def _origin(self, command: UpdateRequested) -> checkpoint.Origin:
        return checkpoint.Origin(command.policy, command.run_id, self.base.name, self.base.sha256, command.seed)


def _shape(command: UpdateRequested) -> SlotShape:
    lora = command.lora
    return SlotShape(lora.rank, lora.alpha, lora.use_rslora, tuple(sorted(lora.target_modules)))


def _refuse_silent_step(command: UpdateRequested, metrics: Mapping[str, float], changed: bool) -> None:
    if metrics and metrics["learning_rate"] > 0 and metrics["grad_norm"] > 0 and not changed:
        raise Fatal(
            f"{command.policy}, step {command.step}: learning rate {metrics['learning_rate']} and gradient norm "
            f"{metrics['grad_norm']}, yet no byte of the adapter changed; the step would be lost in rounding"
        )
