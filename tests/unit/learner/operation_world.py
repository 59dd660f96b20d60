"""A catalog in memory that keeps the promises of operations, and learners that drain it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mint_schemas.commands import CheckpointRef
from mint_schemas.training import Lora

from services.learner.operations import Operations
from services.learner.workbench import Schedule, Workbench
from shared.catalog import operations as ops
from shared.catalog.api import RenewAnswer
from shared.errors import Outage, Refused
from shared.operations import content
from shared.operations.payload import AdamPayload, KlRow, ReverseKlPayload, Row, TrainPayload, decode, encode
from shared.operations.state import state_id
from shared.store.memory import MemoryStore
from tests.tiny import TINY_NAME
from tests.unit.learner.jobs import make_workbench

LORA = Lora(rank=4, alpha=32.0, target_modules=("q_proj", "v_proj"))
ADAM = AdamPayload(learning_rate=1e-2, eps=1e-8, grad_clip_norm=1.0)


class Killed(BaseException):
    """The process is gone: nothing of it goes on."""


@dataclass
class Model:
    """One Tinker model as the catalog has it."""

    policy: str
    lora: Lora
    seed: int
    operations: list[ops.Operation] = field(default_factory=list)
    views: dict[str, ops.OperationView] = field(default_factory=dict)
    checkpoints: dict[str, CheckpointRef] = field(default_factory=dict)
    start: CheckpointRef | None = None
    step: int = 0
    replay: list[ops.Operation] = field(default_factory=list)
    epoch: int = 0
    worker: str | None = None

    @property
    def state_id(self) -> str:
        return state_id("run", self.step, [operation.request_id for operation in self.replay])

    @property
    def waiting(self) -> list[ops.Operation]:
        return [operation for operation in self.operations if operation.request_id not in self.views]


class Catalog:
    """Leases never run out by themselves: `lose_lease` gives them to somebody else. `trouble` is raised by the next
    commits, one each: `before` nothing was written, `after` it was."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.models: dict[str, Model] = {}
        self.before: list[BaseException | None] = []
        self.after: list[BaseException | None] = []
        self.commits: list[ops.CommitOperation] = []
        self.releases: list[ops.OperationsLease] = []
        self.limit = 32

    def model(self, policy: str = "acme/tinker-a", lora: Lora = LORA, seed: int = 7) -> Model:
        made = self.models[policy] = Model(policy, lora, seed)
        return made

    async def submit(self, model: Model, kind: ops.OperationKind, payload: Any, **more: Any) -> str:
        number = len(model.operations) + 1
        request_id = f"{model.policy.rsplit('-', 1)[-1]}-{number}"
        model.operations.append(
            ops.Operation(
                request_id=request_id,
                seq_id=number,
                kind=kind,
                payload=await content.keep(self._store, encode(payload)),
                **more,
            )
        )
        return request_id

    async def result(self, model: Model, request_id: str) -> Any:
        view = model.views[request_id]
        assert view.result is not None, view.failure
        return decode(await content.read(self._store, view.result))

    def failure(self, model: Model, request_id: str) -> ops.Failure:
        found = model.views[request_id].failure
        assert found is not None, model.views[request_id]
        return found

    def lose_lease(self, model: Model) -> None:
        model.epoch, model.worker = model.epoch + 1, "somebody else"

    async def take(self, request: ops.TakeOperations) -> ops.OperationsTaken:
        model = self.models[request.policy]
        own = model.worker == request.worker and request.epoch in (0, model.epoch)
        if model.worker is not None and not own:
            return ops.OperationsTaken(status="busy", retry_after_s=0.2)
        if not model.waiting:
            return ops.OperationsTaken(status="idle")
        if model.worker is None:
            model.epoch, model.worker = model.epoch + 1, request.worker
        bare = {"payload": ops.Content()} if request.holds == model.state_id else {}
        return ops.OperationsTaken(
            status="granted",
            epoch=model.epoch,
            run_id="run",
            model_id=f"s:train:{model.policy}",
            base=TINY_NAME,
            lora=model.lora,
            seed=model.seed,
            step=model.step,
            start=model.start,
            fresh_optimizer=model.start is None,
            state_id=model.state_id,
            replay=tuple(operation.model_copy(update=bare) for operation in model.replay),
            operations=tuple(model.waiting[: self.limit]),
        )

    async def renew(self, request: ops.OperationsLease) -> RenewAnswer:
        return RenewAnswer(held=self._held(request.policy, request.worker, request.epoch))

    async def release(self, request: ops.OperationsLease) -> None:
        self.releases.append(request)
        if self._held(request.policy, request.worker, request.epoch):
            self.models[request.policy].worker = None

    async def commit(self, request: ops.CommitOperation) -> ops.OperationView:
        _raise_next(self.before)
        model = self.models[request.policy]
        if not self._held(request.policy, request.worker, request.epoch):
            raise Refused(f"epoch {request.epoch} is over", "stale_epoch", status=409)
        if request.request_id not in model.views:
            if model.waiting[0].request_id != request.request_id:
                raise Refused(f"{request.request_id} is not next", "out_of_order", status=409)
            self._apply(model, request)
        _raise_next(self.after)
        return model.views[request.request_id]

    def _held(self, policy: str, worker: str, epoch: int) -> bool:
        model = self.models[policy]
        return (model.worker, model.epoch) == (worker, epoch)

    def _apply(self, model: Model, request: ops.CommitOperation) -> None:
        operation = model.waiting[0]
        self.commits.append(request)
        model.views[request.request_id] = ops.OperationView(
            request_id=request.request_id,
            kind=operation.kind,
            state="done" if request.failure is None else "failed",
            seq_id=operation.seq_id,
            result=request.result,
            failure=request.failure,
        )
        if request.failure is not None:
            return
        if request.checkpoint is not None:
            model.checkpoints[request.request_id] = request.checkpoint
        if operation.kind in ("forward_backward", "reverse_kl"):
            model.replay.append(operation)
        if operation.kind in ("optim_step", "load_weights"):
            assert request.checkpoint is not None
            assert request.checkpoint.step == model.step + 1
            model.start, model.step, model.replay = request.checkpoint, request.checkpoint.step, []


def _raise_next(troubles: list[BaseException | None]) -> None:
    trouble = troubles.pop(0) if troubles else None
    if trouble is not None:
        raise trouble


def lost_answer() -> Outage:
    return Outage("the catalog does not answer")


class Learner:
    """One process: what it has in memory is its own. `worker` is its name."""

    def __init__(
        self, directory: Path, catalog: Catalog, store: MemoryStore, worker: str = "w", bench: Any = None, **made: Any
    ) -> None:
        """On `bench`, or on one that is made (`jobs.make_workbench`)."""
        self.bench: Workbench = bench or make_workbench(directory, **{"schedule": Schedule("sliced"), **made})
        self.operations = Operations(catalog, store, {self.bench.base.name: self.bench}, worker, heartbeat_s=30.0)

    async def drain(self, policy: str = "acme/tinker-a") -> None:
        await self.operations.drain(policy, self.operations._tools[self.bench.base.name])

    @property
    def loaded(self) -> list[str]:
        """Whose slots were restored from files."""
        return self.bench._trainer.loaded  # type: ignore[attr-defined,no-any-return]


def rows(seed: int, lengths: tuple[int, ...] = (9, 5, 12), wide: int = 0) -> tuple[Row, ...]:
    """Ragged random rows for cross_entropy, some weights 0, some below."""
    generator = np.random.default_rng(seed)
    made = []
    for length in lengths:
        shape = (length, wide) if wide else (length,)
        weights = generator.choice([0.0, 1.0, 0.5, -0.25], shape).astype(np.float32)
        targets = generator.integers(3, 49152, shape, dtype=np.int64)
        tokens = generator.integers(3, 49152, length, dtype=np.int64)
        made.append(Row(tokens, {"target_tokens": targets, "weights": weights}))
    return tuple(made)


def train(seed: int, **changes: Any) -> TrainPayload:
    return TrainPayload(**{"rows": rows(seed), "loss": "cross_entropy", **changes})


def kl_row(seed: int, student_prompt: int = 3, reference_prompt: int = 6, answer: int = 5, **changes: Any) -> KlRow:
    """Two prompts, one answer; its tokens have weights."""
    generator = np.random.default_rng(seed)
    said = generator.integers(3, 49152, answer, dtype=np.int64)
    prompts = [generator.integers(3, 49152, length, dtype=np.int64) for length in (student_prompt, reference_prompt)]
    student, reference = (np.concatenate([prompt, said]) for prompt in prompts)
    weights = np.zeros(len(student) - 1, np.float32)
    weights[student_prompt - 1 :] = generator.uniform(0.5, 1.5, answer)
    made = {
        "student_input": student[:-1], "reference_input": reference[:-1], "target_tokens": student[1:],
        "weights": weights,
    }  # fmt: skip
    return KlRow(**{**made, **changes})


def kl_payload(*rows: KlRow, temperature: float = 0.7) -> ReverseKlPayload:
    return ReverseKlPayload(rows or (kl_row(0), kl_row(1, answer=3)), "tinker://x/weights/teacher", temperature)
