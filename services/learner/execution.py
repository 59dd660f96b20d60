"""The operations of one grant, in order: each one's work in its turn at the base, then its commit.

In: what the catalog granted (a state by name, how to come to it, and operations). Out: committed results, failures and
training checkpoints. Invariants: files first, then the commit, and a slot has the name of its new state only when
the commit has answered; what fails changes nothing, so that the next operation starts from the state before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mint_schemas.commands import CheckpointRef

from services.learner import checkpoint
from services.learner.one_operation import OperationOutcome, OperationRequest
from services.learner.one_step import SlotLost, shape_of_lora
from services.learner.operation_results import result_of
from services.learner.operation_works import WorkShop
from services.learner.workbench import Workbench
from services.learner.works import Work
from shared.catalog import operations as ops
from shared.errors import Fatal, Outage, Refused, Retryable
from shared.operations import content
from shared.operations.payload import encode
from shared.operations.state import state_id
from shared.store.port import ObjectStore
from shared.telemetry import log, span, spans
from shared.telemetry.metrics import JOB_SECONDS, TOKENS
from shared.worker import AttemptFiles, Faults, LeaseLost, until_answered

__all__ = ["Catalog", "Execution", "Lease", "Tools", "Tries"]

_log = logging.getLogger(__name__)


class Catalog(Protocol):
    async def commit(self, request: ops.CommitOperation) -> ops.OperationView: ...


class Lease(Protocol):
    def check(self) -> None:
        """Raises LeaseLost when the lease was lost or the run ended."""
        ...


class Tries:
    """How often an operation met something that is not its caller's fault, in this process."""

    def __init__(self, most: int = 3) -> None:
        self._most = most
        self._met: dict[str, list[str]] = {}

    def met(self, request_id: str, trouble: Exception) -> None:
        self._met.setdefault(request_id, []).append(f"{type(trouble).__name__}: {trouble}")

    def verdict(self, request_id: str) -> str | None:
        """Why it is given up, once it is."""
        met = self._met.get(request_id, [])
        return f"tried {len(met)} times; the last time: {met[-1]}"[:2000] if len(met) >= self._most else None

    def forget(self, request_id: str) -> None:
        self._met.pop(request_id, None)


@dataclass(frozen=True)
class Tools:
    """What every execution of one base uses."""

    catalog: Catalog
    store: ObjectStore
    bench: Workbench
    worker: str
    tries: Tries
    faults: Faults


class Execution:
    """Of one policy, under one lease."""

    def __init__(
        self, tools: Tools, policy: str, taken: ops.OperationsTaken, lease: Lease, first: bool = False
    ) -> None:
        """`first`: its first operation has the next turn."""
        if taken.lora is None:
            raise Fatal(f"the catalog granted operations of {policy} without the shape of its adapter")
        self._tools, self.policy, self._taken, self._lease = tools, policy, taken, lease
        self._shape = shape_of_lora(taken.lora)
        base = tools.bench.base
        self._origin = checkpoint.Origin(policy, taken.run_id, base.name, base.sha256, taken.seed)
        self._shop = WorkShop(tools.store, tools.bench, policy)
        self._state, self._step = taken.state_id, taken.step
        self._added = [operation.request_id for operation in taken.replay]
        self._first, self._learnt = first, False

    async def run(self) -> None:
        """Raises SlotLost when the state has to be asked for again, LeaseLost when there is nothing more to do
        here, and Retryable for what a later try may mend."""
        for operation in self._taken.operations:
            with span(f"{spans.JOB} {operation.kind}", attributes={"mint.request_id": operation.request_id}):
                await self._one(operation)

    async def _one(self, operation: ops.Operation) -> None:
        self._lease.check()
        began = asyncio.get_running_loop().time()
        try:
            given_up = self._tools.tries.verdict(operation.request_id)
            if given_up is not None:
                failed = await self._fail(operation, given_up, "server")
            else:
                failed = await self._attempt(operation)
        except (SlotLost, LeaseLost, Outage):
            raise
        except Exception as error:
            self._tools.tries.met(operation.request_id, error)
            raise
        self._tools.tries.forget(operation.request_id)
        seconds = asyncio.get_running_loop().time() - began
        JOB_SECONDS.labels(operation.kind, "failed" if failed else "done").observe(seconds)

    async def _attempt(self, operation: ops.Operation) -> bool:
        """Whether it failed, by its caller's fault."""
        try:
            restore = await self._restore()
            job = await self._shop.job(operation, self._step, restore)
            outcome = await self._tools.bench.operate(self._request(restore, job.work), self._goes_first(operation))
        except Fatal as error:
            return await self._fail(operation, str(error), "user")
        files = AttemptFiles(self._tools.store, self._taken.run_id, operation.request_id, self._tools.faults)
        named = outcome.answer.files
        refs = await asyncio.gather(*(files.put(name, data) for name, data in named.items()))
        kept = CheckpointRef(files=dict(zip(named, refs, strict=True)), step=job.step) if named else None
        result = await asyncio.to_thread(lambda: encode(result_of(job, outcome.answer, self._taken.model_id)))
        request = ops.CommitOperation(
            policy=self.policy,
            request_id=operation.request_id,
            worker=self._tools.worker,
            epoch=self._taken.epoch,
            result=await content.keep(self._tools.store, result),
            checkpoint=kept,
            metrics=job.figures(outcome.answer),
        )
        self._tools.faults.hit("after_files")
        view = await self._commit(request)
        self._tools.faults.hit("after_row")
        self._settle(operation, outcome, job.step, view)
        return view.state == "failed"

    def held(self) -> str:
        """The name of the state that the policy's slot is in; nothing where nobody knows."""
        return self._tools.bench.state_of(self.policy, self._shape) or ""

    def ends_with(self, operation: ops.Operation) -> bool:
        """Whether it is the optimizer step of gradients that were just computed. It is short, and nobody's turn is
        put before it: the slot might be given away, and all of them would have to be computed again."""
        return operation.kind == "optim_step" and self._learnt

    def _goes_first(self, operation: ops.Operation) -> bool:
        first, self._first = self._first, False
        return first or self.ends_with(operation)

    def _request(self, restore: Sequence[Work], work: Work) -> OperationRequest:
        return OperationRequest(self.policy, self._shape, self._origin, self._state, restore, work, self._lease.check)

    async def _restore(self) -> Sequence[Work]:
        """Nothing where the slot holds the state. A state that is not the granted one is only in the slot."""
        if self._tools.bench.state_of(self.policy, self._shape) == self._state:
            return ()
        bare = any(
            operation.payload.inline is None and operation.payload.file is None for operation in self._taken.replay
        )
        if bare or self._state != self._taken.state_id:
            raise SlotLost(f"the slot of {self.policy} was given away between two operations")
        return await self._shop.restore(self._taken)

    async def _fail(self, operation: ops.Operation, message: str, category: ops.Category) -> bool:
        log(_log, logging.INFO, "an operation failed", request_id=operation.request_id, reason=message)
        await self._commit(
            ops.CommitOperation(
                policy=self.policy,
                request_id=operation.request_id,
                worker=self._tools.worker,
                epoch=self._taken.epoch,
                failure=ops.Failure(message=message, category=category),
            )
        )
        return True

    async def _commit(self, request: ops.CommitOperation) -> ops.OperationView:
        try:
            with span(spans.COMMIT):
                return await until_answered(lambda: self._tools.catalog.commit(request), self._lease.check)
        except Refused as error:
            if error.code in ("stale_epoch", "run_ended"):
                raise LeaseLost(f"commit refused ({error.code}): {error}", error.code == "run_ended") from error
            raise Retryable(f"the catalog refuses the result of {request.request_id}: {error}") from error

    def _settle(self, operation: ops.Operation, outcome: OperationOutcome, step: int, view: ops.OperationView) -> None:
        self._learnt = outcome.changed and operation.kind in ("forward_backward", "reverse_kl")
        if not outcome.changed:
            return
        TOKENS.labels(self._tools.bench.base.token, "train").inc(outcome.answer.tokens)
        if view.state == "failed":
            raise SlotLost(f"{operation.request_id} was settled as failed; the state is the one before it")
        self._added = [*self._added, operation.request_id] if self._learnt else []
        self._step = step
        self._state = state_id(self._taken.run_id, step, self._added)
        self._tools.bench.keep(outcome, self._state)
