"""Telling the others: the replica's announcement in the replicas bucket, and `revision.ready` events.

The announcement is written on each change and every 5 s, under a TTL, and taken away at shutdown.
Invariant: each (engine boot, revision) has one event id, is announced as ready once as long as it is remembered,
and is not forgotten while the bus is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict

from mint_schemas import RevisionReady

from services.serving.loader import Loaded
from services.serving.residency import Residency
from services.serving.status import Identity, Status
from services.serving.supervise import Supervisor
from shared.bus.bus import Bus
from shared.ending import end
from shared.errors import Retryable
from shared.residency import ANNOUNCE_EVERY_S, REPLICAS_BUCKET
from shared.telemetry import current_traceparent

logger = logging.getLogger(__name__)

READY_TYPE = "mint.v1.revision.ready"
SOURCE = "mint/serving"
RETRY_S = 1.0
QUIET_S = 0.05
"""Changes that come together are told together."""
REMEMBERED = 8192
"""Revisions known to be announced; one that is forgotten is published again under its own event id."""


class Announcer:
    def __init__(self, bus: Bus, identity: Identity, status: Status, residency: Residency) -> None:
        self._bus, self._identity, self._status, self._residency = bus, identity, status, residency
        self._key = f"{identity.base.token}.{identity.name}"
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="announce")

    async def stop(self) -> None:
        await end(self._task)
        with contextlib.suppress(Retryable):
            await self._bus.kv(REPLICAS_BUCKET).delete(self._key)

    async def _run(self) -> None:
        while True:
            self._residency.changed.clear()
            delay = ANNOUNCE_EVERY_S
            replica = self._status.replica()
            if replica is not None:
                try:
                    await self._bus.kv(REPLICAS_BUCKET).put(self._key, replica.model_dump_json().encode())
                except Retryable as error:
                    logger.warning("the announcement was not stored: %s", error)
                    delay = RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._residency.changed.wait()
            await asyncio.sleep(QUIET_S)


class ReadyEvents:
    """Publishes `revision.ready` in the order of the loads, until the bus has stored each."""

    def __init__(self, bus: Bus, identity: Identity, supervisor: Supervisor) -> None:
        self._bus, self._identity, self._supervisor = bus, identity, supervisor
        self._told: OrderedDict[str, None] = OrderedDict()
        self._boot_id = ""
        self._waiting: asyncio.Queue[tuple[RevisionReady, str | None]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="ready-events")

    async def stop(self) -> None:
        await end(self._task)

    def ready(self, loaded: Loaded) -> None:
        proof, boot_id = loaded.proof, self._supervisor.boot_id
        if boot_id != self._boot_id:
            self._told.clear()
            self._boot_id = boot_id
        again = proof.revision in self._told
        self._told[proof.revision] = None
        self._told.move_to_end(proof.revision)
        if again:
            return
        if len(self._told) > REMEMBERED:
            self._told.popitem(last=False)
        event = RevisionReady(
            revision=proof.revision,
            base=self._identity.base.name,
            replica=self._identity.name,
            boot_id=boot_id,
            adapter_sha256=proof.adapter_sha256,
            modules_applied=proof.modules_applied,
            modules_expected=proof.modules_expected,
            tensors_equal=True,
            probe_max_abs_diff=proof.probe_max_abs_diff,
            seconds=proof.seconds,
        )
        self._waiting.put_nowait((event, current_traceparent()))

    async def _run(self) -> None:
        while True:
            event, traceparent = await self._waiting.get()
            await self._publish(event, traceparent)

    async def _publish(self, event: RevisionReady, traceparent: str | None) -> None:
        while True:
            try:
                await self._bus.publish(
                    READY_TYPE,
                    id=f"{event.boot_id}:{event.revision}",
                    source=SOURCE,
                    token=self._identity.base.token,
                    body=event,
                    subject=event.revision,
                    traceparent=traceparent,
                )
            except Retryable as error:
                logger.warning("revision.ready of %s was not stored: %s", event.revision, error)
                await asyncio.sleep(RETRY_S)
            else:
                return
