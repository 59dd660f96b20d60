"""Operations on a `Lab`: clients that submit, and a learner that works on what it takes, without a model."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mint_schemas.commands import CheckpointRef
from mint_schemas.common import FileRef
from mint_schemas.training import Lora
from sqlalchemy.orm import Session

from services.catalog import (
    models,
    new_models,
    operation_commits,
    operation_work,
    operations,
    paths,
    runs,
    samplers,
    samples,
    sessions,
    upkeep,
)
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import OperationRow
from services.catalog.tables import OutboxRow
from shared.catalog import operations as ops
from shared.catalog.operations_client import OperationsClient
from shared.errors import Retryable
from shared.operations.payload import (
    AdamPayload,
    LoadPayload,
    Payload,
    ReverseKlPayload,
    Row,
    SamplePayload,
    SavePayload,
    StepResult,
    TrainPayload,
    TrainResult,
    decode,
    digest,
    encode,
)
from shared.operations.state import state_id
from shared.store.port import ObjectStore
from tests.catalog_kit import TINY, Lab, put_nothing

TENANT = "acme"


def content(data: bytes) -> ops.Content:
    return ops.Content(inline=base64.b64encode(data))


def saved(view: ops.OperationView) -> Any:
    """The decoded result of an operation."""
    assert view.result is not None, view
    assert view.result.inline is not None
    return decode(view.result.inline)


def train(seed: int = 0) -> TrainPayload:
    tokens = np.arange(3, dtype=np.int64) + seed
    row = Row(tokens, {"target_tokens": tokens, "weights": np.ones(3, np.float32)})
    return TrainPayload((row,), "cross_entropy")


def sample(seed: int = 0) -> SamplePayload:
    return SamplePayload(np.arange(3, dtype=np.int64), 1, max_tokens=4, seed=seed)


PAYLOADS: dict[str, Payload] = {
    "forward": train(),
    "forward_backward": train(),
    "optim_step": AdamPayload(),
}


NAMES = {
    "optim_step": ("adapter.safetensors", "optimizer.safetensors", "state.json"),
    "load_weights": ("adapter.safetensors", "optimizer.safetensors", "state.json"),
    "save_weights": ("adapter.safetensors", "optimizer.safetensors", "state.json"),
    "save_sampler_weights": ("adapter.safetensors", "state.json", "probe.json"),
}
"""Which files the training checkpoint of an operation has."""


def file_bytes(run_id: str, step: int, name: str) -> bytes:
    """What an adapter is follows from its run and step alone."""
    return f"{run_id} {step} {name}".encode()


def outcome(
    policy: str, worker: str, taken: ops.OperationsTaken, operation: ops.Operation, step: int, attempt: int
) -> ops.CommitOperation:
    """What a learner commits for an operation of a model that is at `step`."""
    stepping = operation.kind in ("optim_step", "load_weights")
    step += stepping
    folder = f"attempts/{taken.run_id}/{operation.request_id}/a{attempt}"
    files = {
        name: put_nothing(f"{folder}/{name}", file_bytes(taken.run_id, step, name))
        for name in NAMES.get(operation.kind, ())
    }
    result: Any = TrainResult((np.zeros(3, np.float32),), {"loss:sum": 1.0})
    if operation.kind == "optim_step":
        result = StepResult({"grad_norm:mean": 1.0})
    return ops.CommitOperation(
        policy=policy,
        request_id=operation.request_id,
        worker=worker,
        epoch=taken.epoch,
        result=content(encode(result)),
        checkpoint=CheckpointRef(files=files, step=step) if files else None,
        metrics={"grad_norm": 1.0} if operation.kind == "optim_step" else {},
    )


async def work_through(
    client: OperationsClient, store: ObjectStore, policy: str, worker: str, done: list[int] | None = None
) -> None:
    """As a learner does: take, put files, commit, until nothing waits; then the lease is given back. Raises Retryable
    while another holds it."""
    epoch, attempt = 0, 0
    while True:
        taken = await client.take(ops.TakeOperations(policy=policy, worker=worker, epoch=epoch))
        if taken.status == "busy":
            raise Retryable(f"{policy} is worked on", delay_s=0.1)
        if taken.status == "idle":
            break
        epoch, step = taken.epoch, taken.step
        for operation in taken.operations:
            attempt += 1
            request = outcome(policy, worker, taken, operation, step, attempt)
            if request.checkpoint is not None:
                step = request.checkpoint.step
                for name, ref in request.checkpoint.files.items():
                    await store.put(ref.key, file_bytes(taken.run_id, step, name))
            await client.commit(request)
            if done is not None:
                done.append(operation.seq_id)
    if epoch:
        await client.release(ops.OperationsLease(policy=policy, worker=worker, epoch=epoch))


@dataclass
class Learner:
    """One process with one slot a policy; it follows by name what its slot holds, as learners do."""

    lab: Ops
    worker: str = "w1"
    held: dict[str, str] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    replayed: list[str] = field(default_factory=list)
    attempt: int = 0

    def take(self, model_id: str, limit: int = 32, epoch: int = 0) -> ops.OperationsTaken:
        """`epoch`: of the lease that it goes on with."""
        policy = self.lab.model(model_id).policy
        return self.lab.take(policy, self.worker, limit, epoch)

    def request(self, taken: ops.OperationsTaken, operation: ops.Operation, step: int) -> ops.CommitOperation:
        """The outcome of one operation; `step` is the model's before it."""
        self.attempt += 1
        return outcome(self.lab.model(taken.model_id).policy, self.worker, taken, operation, step, self.attempt)

    def execute(self, taken: ops.OperationsTaken, most: int | None = None) -> list[ops.OperationView]:
        """Each operation in order, committed; the first `most` of them."""
        policy = self.lab.model(taken.model_id).policy
        if self.held.get(policy) != taken.state_id:
            self.replayed += [operation.request_id for operation in taken.replay]
        step, added = taken.step, [operation.request_id for operation in taken.replay]
        views = []
        for operation in taken.operations[:most]:
            request = self.request(taken, operation, step)
            views.append(self.lab.commit(request))
            self.done.append(operation.seq_id)
            if operation.kind in ("optim_step", "load_weights"):
                step, added = step + 1, []
            elif operation.kind in ("forward_backward", "reverse_kl"):
                added.append(operation.request_id)
            self.held[policy] = state_id(taken.run_id, step, added)
        return views

    def drain(self, model_id: str) -> list[ops.OperationView]:
        """Until nothing waits, then the lease is given back."""
        views: list[ops.OperationView] = []
        epoch = 0
        while (taken := self.take(model_id, epoch=epoch)).status == "granted":
            views += self.execute(taken)
            epoch = taken.epoch
        assert taken.status == "idle", taken
        if epoch:
            self.lab.release(self.lab.model(model_id).policy, self.worker, epoch)
        return views


class Ops:
    """What the routes do, in the calling thread."""

    def __init__(self, lab: Lab, **rules: Any) -> None:
        self.lab = lab
        self.rules = OperationRules(lab.bases, **rules)

    def write(self, work: Any, *args: Any) -> Any:
        return self.lab.database.write_now(work, *args)

    def now(self) -> float:
        return self.lab.clock()

    def session(self, tenant: str = TENANT) -> str:
        view = self.write(sessions.new_session, ops.NewSession(tenant=tenant), self.rules, self.now())
        return str(view.session_id)

    def finish(self, session_id: str) -> None:
        def finish(session: Session) -> None:
            row = sessions.finish(session, session_id, ops.FinishSession(), self.rules, self.now())
            models.unload_all(session, row.session_id, self.rules, self.now())

        self.write(finish)

    def new_model(self, session_id: str, number: int = 0, **other: Any) -> ops.OperationView:
        fields: dict[str, Any] = {"tenant": None, "base": TINY, "lora": Lora(rank=8), "seed": 1, **other}
        request = ops.NewModel(session_id=session_id, model_seq_id=number, **fields)
        view: ops.OperationView = self.write(new_models.new_model, request, self.rules, self.now())
        return view

    def opened(self, tenant: str = TENANT) -> str:
        """The id of a new model in a session of its own."""
        model_id = self.new_model(self.session(tenant)).model_id
        assert model_id is not None
        return model_id

    def model(self, model_id: str) -> ops.ModelView:
        view: ops.ModelView = self.lab.database.read_now(models.show, model_id, None)
        return view

    def submit(
        self, model_id: str, number: int, kind: str = "forward_backward", payload: Payload | None = None, **other: Any
    ) -> ops.OperationView:
        value = payload if payload is not None else PAYLOADS.get(kind)
        data = encode(value) if value is not None else b""
        fields = {"digest": digest(data), "payload": content(data) if data else ops.Content(), **other}
        request = ops.Submit.model_validate({"model_id": model_id, "seq_id": number, "kind": kind, **fields})
        read = value if isinstance(value, SavePayload | LoadPayload | ReverseKlPayload) else None
        view: ops.OperationView = self.write(operations.submit, request, read, self.rules, self.now())
        return view

    def submit_file(self, model_id: str, number: int, kind: str, file: FileRef) -> ops.OperationView:
        """An operation whose payload is a file."""
        fields = {"digest": file.sha256, "payload": ops.Content(file=file)}
        request = ops.Submit.model_validate({"model_id": model_id, "seq_id": number, "kind": kind, **fields})
        view: ops.OperationView = self.write(operations.submit, request, None, self.rules, self.now())
        return view

    def save(self, model_id: str, number: int, name: str = "", **other: Any) -> ops.OperationView:
        """A sampler save; without a name an ephemeral one, for the sampling session of its own number."""
        payload = SavePayload("sampler_weights", name, sampling_session_seq_id=None if name else number, **other)
        return self.submit(model_id, number, "save_sampler_weights", payload)

    def view(self, request_id: str) -> ops.OperationView:
        view: ops.OperationView = self.lab.database.read_now(operations.show, request_id, None, self.now())
        return view

    def cancel(self, request_id: str) -> ops.OperationView:
        view: ops.OperationView = self.write(operations.cancel, request_id, None, self.rules, self.now())
        return view

    def take(
        self, policy: str, worker: str = "w1", limit: int = 32, epoch: int = 0, holds: str = ""
    ) -> ops.OperationsTaken:
        request = ops.TakeOperations(policy=policy, worker=worker, limit=limit, epoch=epoch, holds=holds)
        taken: ops.OperationsTaken = self.write(operation_work.take, request, self.rules, self.now())
        return taken

    def renew(self, policy: str, worker: str, epoch: int) -> Any:
        lease = ops.OperationsLease(policy=policy, worker=worker, epoch=epoch)
        return self.write(operation_work.renew, lease, self.rules, self.now())

    def release(self, policy: str, worker: str, epoch: int, failure: str = "") -> None:
        lease = ops.OperationsLease(policy=policy, worker=worker, epoch=epoch, failure=failure)
        self.write(operation_work.release, lease, self.rules, self.now())

    def commit(self, request: ops.CommitOperation) -> ops.OperationView:
        view: ops.OperationView = self.write(operation_commits.commit, request, self.rules, self.now())
        return view

    def export(self, model_id: str) -> None:
        """The exporter does what is open, and the fact reaches the catalog."""
        assert self.lab.work(self.model(model_id).run_id) is not None

    def run(self, model_id: str) -> Any:
        return self.lab.database.read_now(runs.find, self.model(model_id).run_id)

    def resolve(self, path: str, tenant: str | None = TENANT) -> ops.PathView:
        view: ops.PathView = self.lab.database.read_now(paths.resolve, path, tenant, self.now())
        return view

    def new_sampler(self, session_id: str, number: int = 0, **what: Any) -> ops.SamplerView:
        request = ops.NewSampler(session_id=session_id, sampling_session_seq_id=number, **what)
        view: ops.SamplerView = self.write(samplers.new_sampler, request, self.rules, self.now())
        return view

    def submit_sample(self, sampler_id: str | None, number: int = 0, seed: int = 0, **other: Any) -> ops.OperationView:
        data = encode(sample(seed))
        request = ops.SubmitSample(
            sampling_session_id=sampler_id, seq_id=number, digest=digest(data), payload=content(data), **other
        )
        view: ops.OperationView = self.write(samples.submit, request, self.rules, self.now())
        return view

    def take_sample(self, request_id: str, worker: str = "r1") -> ops.SampleTaken:
        request = ops.TakeSample(request_id=request_id, worker=worker)
        taken: ops.SampleTaken = self.write(samples.take, request, self.rules, self.now())
        return taken

    def look(self) -> None:
        """As the periodic look does, long after the catalog's start."""
        for chore in upkeep.CHORES:
            self.write(chore, self.rules, 0.0, self.now())

    def messages(self, type_: str) -> list[OutboxRow]:
        return [row for row in self.lab.rows(OutboxRow) if row.type == type_]

    def operation(self, request_id: str) -> OperationRow:
        (row,) = [row for row in self.lab.rows(OperationRow) if row.request_id == request_id]
        found: OperationRow = row
        return found
