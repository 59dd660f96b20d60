"""From an operation of the catalog to the work that does it, with everything that it reads.

In: operations that name payloads and training checkpoints. Out: works that hold them. Invariant: what a caller asked
for and cannot have is Fatal; what we cannot read of our own is Retryable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mint_schemas.commands import CheckpointRef

from services.learner import checkpoint
from services.learner.one_step import reference_of, shape_of_lora
from services.learner.operation_rows import adam_params, datums, kl_rows, loss_call
from services.learner.workbench import Workbench
from services.learner.works import Answer, Backward, BackwardKl, Files, Forward, Load, OptimStep, Reference, Save, Work
from shared.catalog import operations as ops
from shared.errors import Fatal, Retryable
from shared.operations import content
from shared.operations.payload import (
    AdamPayload,
    LoadPayload,
    Payload,
    ReverseKlPayload,
    SavePayload,
    TrainPayload,
    decode,
)
from shared.rl.checkpoint import ADAPTER_FILE, GRADIENTS_FILE, OPTIMIZER_FILE, STATE_FILE
from shared.store.port import ObjectStore

__all__ = ["Job", "Unreadable", "WorkShop"]

P = TypeVar("P")


class Unreadable(Retryable):
    """Something of our own that an operation needs cannot be read."""


@dataclass(frozen=True)
class Job:
    """`step`: the policy's, once the work is committed."""

    operation: ops.Operation
    payload: Payload
    work: Work
    step: int

    def figures(self, answer: Answer) -> dict[str, float]:
        """For the run's journal."""
        if not isinstance(self.payload, AdamPayload):
            return {}
        return {
            "grad_norm": answer.norm,
            "learning_rate": self.payload.learning_rate,
            "optimizer_step": float(answer.optimizer_step),
        }


class WorkShop:
    """For one policy."""

    def __init__(self, store: ObjectStore, bench: Workbench, policy: str) -> None:
        self._store, self._bench, self._policy = store, bench, policy

    async def job(self, operation: ops.Operation, step: int, before: Sequence[Work] = ()) -> Job:
        """`step`: the policy's before it; `before`: what its turn begins with. Raises Fatal for what is wrong with what
        was asked, Unreadable."""
        payload = await self._payload(operation)
        match operation.kind:
            case "forward" | "forward_backward" | "reverse_kl":
                return Job(operation, payload, await self._pass(operation, payload, before), step)
            case "optim_step":
                params = adam_params(_is(AdamPayload, payload, operation))
                return Job(operation, payload, OptimStep(params, step + 1), step + 1)
            case "save_weights":
                _is(SavePayload, payload, operation)
                return Job(operation, payload, Save(step, probe=False), step)
            case "save_sampler_weights":
                _is(SavePayload, payload, operation)
                return Job(operation, payload, Save(step, probe=True), step)
            case "load_weights":
                wanted = _is(LoadPayload, payload, operation)
                return Job(operation, payload, await self._load(operation, wanted, step + 1), step + 1)
        raise Unreadable(f"a learner does no {operation.kind}; {operation.request_id} is not its to do")

    async def restore(self, taken: ops.OperationsTaken) -> Sequence[Work]:
        """Brings a slot into the granted state. Raises Unreadable."""
        try:
            files = None if taken.start is None else await self._files(taken.start, taken.fresh_optimizer)
            works: list[Work] = [Load(files, taken.seed, taken.fresh_optimizer)]
            for operation in taken.replay:
                works.append(await self._pass(operation, await self._payload(operation), works))
        except Fatal as error:
            raise Unreadable(f"the state of {self._policy} cannot be read: {error}") from error
        return works

    async def _payload(self, operation: ops.Operation) -> Payload:
        try:
            data = await content.read(self._store, operation.payload)
            found = await asyncio.to_thread(decode, data)
        except (Fatal, ValueError) as error:
            raise Unreadable(f"the payload of {operation.request_id} cannot be read: {error}") from error
        return found  # type: ignore[return-value]  # the kind says which, and each use asks

    async def _pass(self, operation: ops.Operation, payload: Payload, before: Sequence[Work]) -> Work:
        if operation.kind == "reverse_kl":
            asked = _is(ReverseKlPayload, payload, operation)
            reference = await self._reference(operation, before)
            return BackwardKl(await asyncio.to_thread(kl_rows, asked), asked.temperature, reference)
        rows = _is(TrainPayload, payload, operation)
        call = loss_call(rows)
        data = await asyncio.to_thread(datums, rows)
        return Forward(data, call) if operation.kind == "forward" else Backward(data, call)

    async def _load(self, operation: ops.Operation, payload: LoadPayload, step: int) -> Load:
        if operation.reference is None:
            raise Unreadable(f"{operation.request_id} loads {payload.path}, but names no training checkpoint")
        fresh = not (payload.optimizer and operation.has_optimizer)
        return Load(await self._files(operation.reference, fresh), 0, fresh, step)

    async def _reference(self, operation: ops.Operation, before: Sequence[Work]) -> Reference:
        """With its files, unless its slot holds it once the works `before` it, of the same turn, are through."""
        if operation.reference is None or operation.reference_lora is None:
            raise Unreadable(f"{operation.request_id} is measured against a reference, but names none")
        key, shape = reference_of(self._policy), shape_of_lora(operation.reference_lora)
        name = checkpoint.identity(operation.reference)
        earlier = [work.reference for work in before if isinstance(work, BackwardKl)]
        if name == (earlier[-1].identity if earlier else self._bench.state_of(key, shape)):
            return Reference(key, shape, name, None)
        read = next((one.files for one in earlier if one.identity == name and one.files is not None), None)
        return Reference(key, shape, name, read or await self._files(operation.reference, True))

    async def _files(self, reference: CheckpointRef, fresh_optimizer: bool) -> Files:
        wanted = {ADAPTER_FILE, STATE_FILE}
        if not fresh_optimizer:
            wanted |= {OPTIMIZER_FILE} | ({GRADIENTS_FILE} & reference.files.keys())
        missing = wanted - reference.files.keys()
        if missing:
            raise Unreadable(f"the training checkpoint of step {reference.step} has no {', '.join(sorted(missing))}")
        try:
            return {name: await self._store.get(reference.files[name]) for name in sorted(wanted)}
        except Fatal as error:
            raise Unreadable(f"the training checkpoint of step {reference.step} cannot be read: {error}") from error


def _is(kind: type[P], payload: Any, operation: ops.Operation) -> P:
    if not isinstance(payload, kind):
        raise Unreadable(f"{operation.request_id} is a {operation.kind}, its payload a {type(payload).__name__}")
    return payload
