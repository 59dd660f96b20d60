"""What operations compute: each one work on a policy's slot, by the trainer's primitives and nothing beside them.

In: the place where it happens, with rows, settings or files. Out: figures and files. Invariant: a work notes that it
changes the slot's state before it does; one that fails without that note has left the state as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from services.learner import checkpoint
from services.learner.datum import Datum
from services.learner.heads import LossCall, LossHead
from services.learner.optimizer import AdamParams
from services.learner.reverse_kl import KlRow
from services.learner.slots import Slot, SlotShape
from services.learner.trainer import Trainer
from services.learner.turns import Check
from shared.adapters.layout import canonical_json
from shared.adapters.manifest import Probe
from shared.errors import Fatal
from shared.rl.checkpoint import ADAPTER_FILE, PROBE_FILE
from shared.rl.seeds import derive_seed
from shared.telemetry.metrics import STEP_PART_SECONDS

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Reference:
    """A frozen adapter in a slot of its own. `files` None: the slot of `key` holds what `identity` names."""

    key: str
    shape: SlotShape
    identity: str
    files: Files | None


@dataclass
class Place:
    """`slot` is in the state that the work starts from. `reference` gives a reference's slot, loaded."""

    slot: Slot
    trainer: Trainer
    origin: checkpoint.Origin
    check: Check
    probe: Callable[[Slot, Check], Probe]
    reference: Callable[[Reference], Slot]
    changed: bool = False


@dataclass(frozen=True)
class Answer:
    """What came out; what a work does not have is empty. `losses` are those of rows, `loss` their sum; `tokens`
    were trained on."""

    loss: float = 0.0
    tokens: int = 0
    losses: Sequence[float] = ()
    logprobs: Sequence[Sequence[float]] = ()
    norm: float = 0.0
    optimizer_step: int = 0
    files: Files = field(default_factory=dict)


class Work(Protocol):
    def run(self, at: Place) -> Answer:
        """Raises Fatal for what the caller asked for and cannot have."""
        ...


@dataclass(frozen=True)
class Forward:
    data: Sequence[Datum]
    call: LossCall

    def run(self, at: Place) -> Answer:
        head = LossHead(self.call)
        head.check_inputs(self.data)
        logprobs = at.trainer.forward(at.slot, self.data, self.call.temperature, at.check)
        return Answer(loss=head.value(self.data, logprobs), logprobs=logprobs)


@dataclass(frozen=True)
class Backward:
    data: Sequence[Datum]
    call: LossCall

    def run(self, at: Place) -> Answer:
        with STEP_PART_SECONDS.labels("forward_backward").time():
            result = at.trainer.forward_backward(at.slot, self.data, self.call, at.check)
        at.changed = True  # the primitive adds to the slot's gradients last, when nothing can fail any more
        return Answer(loss=result.loss, tokens=result.tokens, logprobs=result.logprobs)


@dataclass(frozen=True)
class BackwardKl:
    rows: Sequence[KlRow]
    temperature: float
    reference: Reference

    def run(self, at: Place) -> Answer:
        reference = at.reference(self.reference)
        with STEP_PART_SECONDS.labels("forward_backward").time():
            result = at.trainer.reverse_kl(at.slot, reference, self.rows, self.temperature, at.check)
        at.changed = True
        return Answer(loss=result.loss, tokens=sum(len(row.student_ids) for row in self.rows), losses=result.losses)


@dataclass(frozen=True)
class OptimStep:
    """`step`: the number of the training checkpoint that comes of it."""

    params: AdamParams
    step: int

    def run(self, at: Place) -> Answer:
        before = checkpoint.adapter_bytes(at.slot)
        at.changed = at.slot.accumulated > 0
        with STEP_PART_SECONDS.labels("optimizer").time():
            norm = at.trainer.optim_step(at.slot, self.params)
        if not bool(torch.isfinite(at.slot.flat).all()):
            raise Fatal(f"the step made weights that are not finite (learning rate {self.params.learning_rate})")
        files = _files(at, self.step)
        if self.params.learning_rate > 0 and norm > 0 and files[ADAPTER_FILE] == before:
            raise Fatal(
                f"learning rate {self.params.learning_rate} and gradient norm {norm}, yet no byte of the adapter "
                "changed; the step would be lost in rounding"
            )
        return Answer(norm=norm, optimizer_step=at.slot.optimizer.step_count, files=files)


@dataclass(frozen=True)
class Save:
    """`probe`: with the logprobs by which serving proves what it loaded."""

    step: int
    probe: bool

    def run(self, at: Place) -> Answer:
        files = dict(_files(at, self.step))
        if self.probe:
            files[PROBE_FILE] = canonical_json(at.probe(at.slot, at.check).model_dump(mode="json"))
        return Answer(files=files)


@dataclass(frozen=True)
class Load:
    """A training checkpoint's state, or (`files` None) a fresh adapter from `seed`. `step`: the number of the
    training checkpoint that comes of it; None = none does."""

    files: Files | None
    seed: int
    fresh_optimizer: bool
    step: int | None = None

    def run(self, at: Place) -> Answer:
        with STEP_PART_SECONDS.labels("restore").time():
            if self.files is None:
                at.slot.initialise(derive_seed(self.seed, "adapter-init"))
            else:
                at.trainer.load(at.slot, self.files, at.origin.base_sha256, self.fresh_optimizer)
        at.changed = True
        return Answer() if self.step is None else Answer(files=_files(at, self.step))


def _files(at: Place, step: int) -> Files:
    with STEP_PART_SECONDS.labels("write").time():
        return at.trainer.save(at.slot, at.origin, step)
