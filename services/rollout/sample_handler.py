"""`sample.requested` → one sample operation: take, sample, commit.

In: a message that names the operation. Out: nothing but what the catalog is told. Invariant: what is committed is a
whole result or a failure for its caller; everything else is given back and tried again.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import CancelledError
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol

from mint_schemas.commands import SampleRequested

from services.rollout.samples import OperationSampler, UserFault
from shared.bus import Received
from shared.catalog import operations as ops
from shared.catalog.api import RenewAnswer
from shared.errors import Busy, Fatal, MintError, Outage, Refused, Retryable
from shared.operations import content
from shared.operations.payload import SamplePayload, decode, encode
from shared.store.port import ObjectStore
from shared.telemetry import log, log_fields, span, spans
from shared.telemetry.metrics import JOB_SECONDS, LEASES_LOST
from shared.worker import Faults, LeaseLost, LeaseView, until_answered

__all__ = ["SampleCatalog", "SampleHandler"]

_log = logging.getLogger(__name__)

_RELEASE_S = 2.0
_KIND = "sample"


class SampleCatalog(Protocol):
    async def take_sample(self, request: ops.TakeSample) -> ops.SampleTaken: ...
    async def renew(self, request: ops.OperationsLease) -> RenewAnswer: ...
    async def release(self, request: ops.OperationsLease) -> None: ...
    async def commit(self, request: ops.CommitOperation) -> ops.OperationView: ...


class SampleHandler:
    """`samplers` by the base's public name."""

    def __init__(
        self,
        catalog: SampleCatalog,
        store: ObjectStore,
        samplers: Mapping[str, OperationSampler],
        worker: str,
        heartbeat_s: float,
        faults: Faults | None = None,
    ) -> None:
        self._catalog, self._store, self._samplers = catalog, store, samplers
        self._worker, self._heartbeat_s, self._faults = worker, heartbeat_s, faults or Faults("")

    async def handle(self, received: Received) -> None:
        asked = received.decode(SampleRequested)
        with log_fields(request_id=asked.request_id):
            await self.work(asked.request_id, asked.base)

    async def work(self, request_id: str, base: str) -> None:
        """Returns when the operation is settled. Raises Retryable when somebody else, or a later try, has to."""
        sampler = self._samplers.get(base)
        if sampler is None:
            raise Fatal(f"no base model {base!r} is configured here; there are {', '.join(self._samplers)}")
        taken = await self._take(request_id)
        if taken.status == "busy":
            raise Retryable("another worker samples this", delay_s=max(0.1, taken.retry_after_s))
        if taken.status == "closed":
            log(_log, logging.INFO, "dropped: the operation is settled")
            return
        try:
            await self._leased(request_id, sampler, taken)
        except LeaseLost as error:
            if not error.cancelled:
                LEASES_LOST.labels(_KIND).inc()
                raise Retryable(str(error)) from error
            log(_log, logging.INFO, "dropped: nobody wants the sample any more")

    async def _take(self, request_id: str) -> ops.SampleTaken:
        try:
            with span(spans.TAKE):
                return await self._catalog.take_sample(ops.TakeSample(request_id=request_id, worker=self._worker))
        except Refused as error:
            raise Fatal(f"the catalog refuses sample {request_id}: {error}") from error

    async def _leased(self, request_id: str, sampler: OperationSampler, taken: ops.SampleTaken) -> None:
        lease = ops.OperationsLease(policy="", request_id=request_id, worker=self._worker, epoch=taken.epoch)
        renew = partial(self._catalog.renew, lease)
        try:
            async with LeaseView(renew, taken.epoch, request_id, self._heartbeat_s) as view:
                await self._sample(request_id, sampler, taken, view)
        except LeaseLost:
            raise
        except (CancelledError, Outage, Busy):
            await self._release(lease)
            raise
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            await self._release(lease.model_copy(update={"failure": words[:500]}))
            if isinstance(error, Fatal):  # a dead letter would settle nothing: the operation still waits
                raise Retryable(words) from error
            raise

    async def _sample(
        self, request_id: str, sampler: OperationSampler, taken: ops.SampleTaken, view: LeaseView
    ) -> None:
        began = asyncio.get_running_loop().time()
        outcome = ops.CommitOperation(request_id=request_id, worker=self._worker, epoch=taken.epoch)
        try:
            with span(f"{spans.JOB} {_KIND}", attributes={"mint.request_id": request_id}):
                asked = await self._asked(request_id, taken)
                result = await sampler.sample(request_id, taken, asked, view.check)
            data = await asyncio.to_thread(encode, result)
            outcome = outcome.model_copy(update={"result": await content.keep(self._store, data)})
        except UserFault as error:
            outcome = outcome.model_copy(update={"failure": ops.Failure(message=str(error), category="user")})
        self._faults.hit("after_files")
        await self._commit(outcome, view)
        self._faults.hit("after_row")
        seconds = asyncio.get_running_loop().time() - began
        JOB_SECONDS.labels(_KIND, "done" if outcome.failure is None else "failed").observe(seconds)

    async def _asked(self, request_id: str, taken: ops.SampleTaken) -> SamplePayload:
        if taken.payload is None:
            raise Fatal(f"the catalog granted sample {request_id} without its payload")
        asked = decode(await content.read(self._store, taken.payload))
        if not isinstance(asked, SamplePayload):
            raise Fatal(f"the payload of sample {request_id} is a {type(asked).__name__}")
        return asked

    async def _commit(self, request: ops.CommitOperation, view: LeaseView) -> None:
        try:
            with span(spans.COMMIT):
                await until_answered(lambda: self._catalog.commit(request), view.check)
        except Refused as error:
            if error.code in ("stale_epoch", "run_ended"):
                raise LeaseLost(f"commit refused ({error.code}): {error}", error.code == "run_ended") from error
            raise Retryable(f"the catalog refuses the result of {request.request_id}: {error}") from error

    async def _release(self, lease: ops.OperationsLease) -> None:
        with suppress(MintError, TimeoutError):
            async with asyncio.timeout(_RELEASE_S):
                await self._catalog.release(lease)
