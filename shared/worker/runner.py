"""One command, from its message to its event: take → job → commit → publish → ack.

In: a command of the bus. Out: the event that the catalog's commit answered with, never the job's own
result. Invariant: whatever is killed wherever, a later delivery either finds the commit and publishes
its event again, or starts a new attempt; nothing is applied twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from shared.bus import Received, command_durable
from shared.catalog import api
from shared.errors import Fatal, MintError, Outage, Refused, Retryable
from shared.telemetry import current_traceparent, log, log_fields, span, spans
from shared.telemetry.metrics import JOB_SECONDS, LEASES_LOST

from .faults import Faults
from .files import AttemptFiles
from .lease import LeaseLost, LeaseView

if TYPE_CHECKING:
    from shared.service import Resources

__all__ = ["Job", "WorkCommand", "serve_commands"]

_log = logging.getLogger(__name__)

_RELEASE_S = 2.0


class WorkCommand(Protocol):
    """What every command body has."""

    @property
    def command_id(self) -> str: ...
    @property
    def run_id(self) -> str: ...
    @property
    def kind(self) -> Any: ...


C = TypeVar("C", bound=WorkCommand)

Job = Callable[[C, AttemptFiles, LeaseView], Awaitable[api.Result]]


async def serve_commands(
    resources: Resources,
    contract_type: str,
    model: type[C],
    job: Job[C],
    bases: Iterable[str],
    concurrency: int = 1,
) -> None:
    """Subscribe to the commands of `contract_type` for each of `bases` (public names) and work on up to
    `concurrency` of them at once per base; returns when subscribed.

    The job gets the command, its files and its lease, and returns the result to commit. It raises Fatal
    to fail the run, Retryable to be run again; it must not block the event loop."""
    runner = Runner(resources, model, job)
    for name in bases:
        durable = command_durable(contract_type, resources.bases[name].token)
        await resources.bus.consume(durable, runner.handle, concurrency)


class Runner(Generic[C]):
    """Handles the commands of one type."""

    def __init__(self, resources: Resources, model: type[C], job: Job[C]) -> None:
        settings = resources.settings
        self._bus, self._store, self._catalog = resources.bus, resources.store, resources.catalog
        self._source, self._worker = f"mint/{resources.name}", settings.worker_id
        self._heartbeat_s = settings.heartbeat_s
        self._faults = Faults(resources.name, settings.fault, settings.fault_dir)
        self._model, self._job = model, job

    async def handle(self, received: Received) -> None:
        command: C = received.decode(self._model)  # type: ignore[type-var]
        with log_fields(run_id=command.run_id, command_id=command.command_id):
            with span(spans.TAKE):
                taken = await self._take(command)
            if taken.status == "granted":
                await self._work(command, taken.epoch)
            elif taken.status == "committed" and taken.event is not None:
                await self._publish(taken.event)
            elif taken.status == "busy":
                raise Retryable("another worker holds the lease", delay_s=max(0.1, taken.retry_after_s))
            elif taken.status == "exhausted":
                raise Fatal(taken.reason or "taken too often without a commit")
            else:
                log(_log, logging.INFO, "dropped: the run is over or the command superseded", reason=taken.reason)

    async def _take(self, command: C) -> api.TakeAnswer:
        try:
            return await self._catalog.take(api.TakeRequest(command_id=command.command_id, worker=self._worker))
        except Refused as error:
            raise Fatal(f"the catalog refuses {command.command_id}: {error}") from error

    async def _work(self, command: C, epoch: int) -> None:
        request = api.LeaseRequest(command_id=command.command_id, worker=self._worker, epoch=epoch)
        files = AttemptFiles(self._store, command.run_id, command.command_id, self._faults)
        renew = partial(self._catalog.renew, request)
        try:
            async with LeaseView(renew, epoch, command.command_id, self._heartbeat_s) as lease:
                result = await self._run(command, files, lease)
                self._faults.hit("after_files")
                event = await self._commit(request, result)
        except LeaseLost as error:
            if not error.cancelled:
                LEASES_LOST.labels(command.kind).inc()
                raise Retryable(str(error)) from error
            log(_log, logging.INFO, "dropped: the run is over, or needs this no longer")
            return
        except (asyncio.CancelledError, Outage):
            # A shutdown or an outage is no failure; the next worker need not wait for the lease to run out.
            await self._release(request)
            raise
        except Exception as error:
            await self._release(request.model_copy(update={"failure": f"{type(error).__name__}: {error}"[:500]}))
            raise
        self._faults.hit("after_row")
        log(_log, logging.INFO, "committed", kind=command.kind, event=event.type)
        await self._publish(event)
        self._faults.hit("after_publish")

    async def _run(self, command: C, files: AttemptFiles, lease: LeaseView) -> api.Result:
        started = asyncio.get_running_loop().time()
        outcome = "failed"
        try:
            with span(f"{spans.JOB} {command.kind}", attributes={"mint.command_id": command.command_id}):
                result = await self._job(command, files, lease)
            outcome = "done"
            return result
        finally:
            JOB_SECONDS.labels(command.kind, outcome).observe(asyncio.get_running_loop().time() - started)

    async def _commit(self, lease: api.LeaseRequest, result: api.Result) -> api.OutgoingEvent:
        request = api.CommitRequest(command_id=lease.command_id, worker=lease.worker, epoch=lease.epoch, result=result)
        try:
            with span(spans.COMMIT):
                return (await self._catalog.commit(request)).event
        except Refused as error:
            if error.code in ("run_ended", "wrong_step", "stale_epoch"):
                # A later take tells what to do: publish what won, wait, or drop it.
                raise LeaseLost(f"commit refused ({error.code}): {error}", error.code == "run_ended") from error
            raise Fatal(f"the catalog refuses the result of {lease.command_id}: {error}") from error

    async def _publish(self, event: api.OutgoingEvent) -> None:
        await self._bus.publish(
            event.type,
            event.id,
            self._source,
            event.token,
            event.body,
            subject=event.subject,
            traceparent=current_traceparent(),
        )

    async def _release(self, request: api.LeaseRequest) -> None:
        with suppress(MintError, asyncio.TimeoutError):
            async with asyncio.timeout(_RELEASE_S):
                await self._catalog.release(request)
