"""`operations.requested` → the operations of one policy, until there are none.

In: a message that names a policy. Out: nothing but what the catalog is told: take → execute and commit … → release.
Invariants: a policy is in one hand at a time, in this process and, by its lease, anywhere; whatever is killed
wherever, the next to take it goes on from the last commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from mint_schemas.commands import OperationsRequested

from services.learner.execution import Execution, Tools, Tries
from services.learner.one_step import SlotLost
from services.learner.workbench import Workbench
from shared.bus import Received
from shared.catalog import operations as ops
from shared.catalog.api import RenewAnswer
from shared.errors import Fatal, MintError, Outage, Refused, Retryable
from shared.store.port import ObjectStore
from shared.telemetry import log, log_fields, span, spans
from shared.telemetry.metrics import LEASES_LOST
from shared.worker import Faults, LeaseLost, LeaseView

__all__ = ["Catalog", "Operations"]

_log = logging.getLogger(__name__)

GRANTS = 16
"""After so many a policy's message is done, so that those that wait for one of this process's hands get it."""

_RELEASE_S = 2.0


class Catalog(Protocol):
    async def take(self, request: ops.TakeOperations) -> ops.OperationsTaken: ...
    async def renew(self, request: ops.OperationsLease) -> RenewAnswer: ...
    async def release(self, request: ops.OperationsLease) -> None: ...
    async def commit(self, request: ops.CommitOperation) -> ops.OperationView: ...


class Operations:
    """`benches` by public base name."""

    def __init__(
        self,
        catalog: Catalog,
        store: ObjectStore,
        benches: Mapping[str, Workbench],
        worker: str,
        heartbeat_s: float,
        faults: Faults | None = None,
    ) -> None:
        self._catalog, self._worker, self._heartbeat_s = catalog, worker, heartbeat_s
        tries, faults = Tries(), faults or Faults("")
        self._tools = {name: Tools(catalog, store, bench, worker, tries, faults) for name, bench in benches.items()}
        self._hands: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def handle(self, received: Received) -> None:
        asked = received.decode(OperationsRequested)
        tools = self._tools.get(asked.base)
        if tools is None:
            raise Fatal(f"this learner has no base {asked.base!r}; it holds {', '.join(sorted(self._tools))}")
        with log_fields(policy=asked.policy):
            await self.drain(asked.policy, tools)

    async def drain(self, policy: str, tools: Tools) -> None:
        """Returns when nothing waits, or others shall have a turn of this process. Raises Retryable when somebody
        else, or a later try, has to go on."""
        lock = self._hands.get(policy) or asyncio.Lock()
        self._hands[policy] = lock
        try:
            async with lock:
                await self._until_idle(policy, tools)
        except LeaseLost as error:
            if not error.cancelled:
                LEASES_LOST.labels("operations").inc()
                raise Retryable(str(error)) from error
            log(_log, logging.INFO, "dropped: the model is unloaded, or its session over")

    async def _until_idle(self, policy: str, tools: Tools) -> None:
        """Work that waits when the lease is given back brings a message of its own."""
        taken, first = await self._take(policy, 0, tools.bench.holding(policy) or ""), False
        held = taken
        for _ in range(GRANTS):
            if not taken.operations:
                break
            taken, first = await self._grant(policy, tools, taken, first)
            held = taken if taken.status == "granted" else held
        if taken.status == "busy":
            raise Retryable(f"another learner works on {policy}", delay_s=max(0.1, taken.retry_after_s))
        if held.status == "granted":
            await self._release(self._lease(policy, held))

    async def _grant(
        self, policy: str, tools: Tools, taken: ops.OperationsTaken, first: bool
    ) -> tuple[ops.OperationsTaken, bool]:
        """Its operations; then what the catalog grants next, and whether that has the next turn."""
        lease = self._lease(policy, taken)
        renew = partial(self._catalog.renew, lease)
        try:
            async with LeaseView(renew, taken.epoch, policy, self._heartbeat_s) as view:
                return await self._execute(Execution(tools, policy, taken, view, first), taken)
        except LeaseLost:
            raise
        except (asyncio.CancelledError, Outage):
            await self._release(lease)
            raise
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            await self._release(lease.model_copy(update={"failure": words[:500]}))
            if isinstance(error, Fatal):  # a dead letter would end nothing: the operations still wait
                raise Retryable(words) from error
            raise

    async def _execute(self, execution: Execution, taken: ops.OperationsTaken) -> tuple[ops.OperationsTaken, bool]:
        try:
            await execution.run()
        except SlotLost as error:
            log(_log, logging.INFO, "the state is asked for again", reason=str(error))
            return await self._take(execution.policy, taken.epoch), True
        following = await self._take(execution.policy, taken.epoch, execution.held())
        return following, bool(following.operations) and execution.ends_with(following.operations[0])

    def _lease(self, policy: str, taken: ops.OperationsTaken) -> ops.OperationsLease:
        return ops.OperationsLease(policy=policy, worker=self._worker, epoch=taken.epoch)

    async def _take(self, policy: str, epoch: int, holds: str = "") -> ops.OperationsTaken:
        """`epoch`: of the lease that it goes on with; 0 = none. `holds`: the state that the policy's slot is in."""
        request = ops.TakeOperations(policy=policy, worker=self._worker, epoch=epoch, holds=holds)
        try:
            with span(spans.TAKE):
                return await self._catalog.take(request)
        except Refused as error:
            raise Fatal(f"the catalog refuses the operations of {policy}: {error}") from error

    async def _release(self, lease: ops.OperationsLease) -> None:
        with suppress(MintError, TimeoutError):
            async with asyncio.timeout(_RELEASE_S):
                await self._catalog.release(lease)
