"""Wiring: the database, the driver, the relay, the subscriptions and the routes of one catalog process.

Start: migrate, listen to the replicas, look at every run once, then relay and consume. Stop: end the
background tasks, let the transactions that have begun finish.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter

from services.catalog import clock, emit, notices, outbox, sweep
from services.catalog.config import CatalogSettings
from services.catalog.database import Database, sqlite_url
from services.catalog.drive import Driver
from services.catalog.handlers import Handlers
from services.catalog.leases import LeaseRules
from services.catalog.measures import measure
from services.catalog.migrate import migrate
from services.catalog.moves import Mover
from services.catalog.outbox import Relay
from services.catalog.parts import Parts
from services.catalog.routes_keys import key_routes
from services.catalog.routes_operations import operation_routes
from services.catalog.routes_paths import path_routes
from services.catalog.routes_policies import policy_routes
from services.catalog.routes_runs import run_routes
from services.catalog.routes_sessions import session_routes
from services.catalog.routes_work import work_routes
from services.catalog.tables import OutboxRow
from services.catalog.validate import Validator
from services.catalog.waiting import Waiters
from shared import open_files
from shared.bus.table import CATALOG_DEAD, CATALOG_EVENTS, CATALOG_TRAIN
from shared.ending import end
from shared.errors import Retryable
from shared.residency import REPLICAS_BUCKET, RESIDENCY_BUCKET, Desired
from shared.service import Resources
from shared.tasks import RewardSettings
from shared.worker.faults import Faults

RESTART_S = 1.0
MEASURE_S = 5.0

_log = logging.getLogger(__name__)


class CatalogApp:
    def __init__(self, resources: Resources, settings: CatalogSettings, now: clock.Clock = clock.wall) -> None:
        self._resources, self._settings, self._now = resources, settings, now
        data_dir = resources.settings.data_dir
        if not settings.database_url:
            data_dir.mkdir(parents=True, exist_ok=True)
        self._where = settings.database_url or str(data_dir)
        self.database = Database(settings.database_url or sqlite_url(data_dir))
        self.relay = Relay(self.database, self._publish, now)
        self.driver = Driver(
            self.database, resources.bases, resources.store, settings, now, self._write_desired, self.relay.wake
        )
        rewards = RewardSettings.parsed(resources.settings.reward_hosts)
        validator = Validator(self.database, resources.store, resources.bases, self.driver.readiness, rewards)
        self.handlers = Handlers(self.database, self.driver, validator, resources.bases, now)
        self.parts = Parts(
            database=self.database,
            driver=self.driver,
            validator=validator,
            mover=Mover(self.database, self.driver, resources.bases, now, settings.min_ready),
            store=resources.store,
            bases=resources.bases,
            lease_rules=LeaseRules(settings.lease_ttl_s, settings.command_deadline_s, settings.max_takes),
            clock=now,
            waiters=Waiters(self.database),
            tenant_pins=settings.tenant_pins,
        )
        self._freed: asyncio.Queue[list[str]] = asyncio.Queue()
        self._faults = Faults(resources.name, resources.settings.fault, resources.settings.fault_dir)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def routers(self) -> Sequence[APIRouter]:
        groups = (
            work_routes,
            run_routes,
            policy_routes,
            key_routes,
            session_routes,
            operation_routes,
            path_routes,
        )
        return [routes(self.parts) for routes in groups]

    async def start(self) -> None:
        """Raises Fatal for a data directory that a newer build wrote."""
        await asyncio.to_thread(migrate, self.database.engine, self._where)
        self._listen()
        try:
            await self.driver.look()
        except Retryable as error:
            _log.warning("the first look at the runs is put off to the periodic one: %s", error)
        for work in (
            self.relay.run,
            self._watch_replicas,
            self.driver.run,
            self.parts.waiters.run,
            self._remove_freed,
            self._measure,
            self._sweep,
        ):
            self._tasks.append(asyncio.create_task(_forever(work), name=f"catalog {work.__qualname__}"))
        bus = self._resources.bus
        await bus.advisories(self.handlers.advisory)
        await bus.consume(CATALOG_DEAD, self.handlers.dead)
        await bus.consume(CATALOG_EVENTS, self.handlers.event)
        await bus.consume(CATALOG_TRAIN, self.handlers.train_requested)

    async def stop(self) -> None:
        await end(*self._tasks)
        await asyncio.to_thread(self.database.close)

    def healthy(self) -> str | None:
        ended = [task.get_name() for task in self._tasks if task.done()]
        return f"{', '.join(ended)} ended" if ended else None

    def _listen(self) -> None:
        """To what transactions say behind their commit, from the thread of each."""
        loop = asyncio.get_running_loop()

        def committed(told: Mapping[Any, Any]) -> None:
            self.parts.waiters.committed(told)
            keys = notices.freed_in(told)
            if keys:
                loop.call_soon_threadsafe(self._freed.put_nowait, keys)

        self.database.committed = committed

    async def _remove_freed(self) -> None:
        while True:
            await self.driver.remove(await self._freed.get())

    async def _publish(self, row: OutboxRow) -> None:
        self._faults.hit("after_row")
        await self._resources.bus.publish(
            row.type,
            row.ce_id,
            emit.SOURCE,
            row.token,
            row.body,
            subject=row.subject,
            traceparent=row.traceparent,
            replay=row.replay,
        )
        self._faults.hit("after_publish")

    async def _write_desired(self, token: str, wanted: Desired) -> None:
        await self._resources.bus.kv(RESIDENCY_BUCKET).put(token, wanted.model_dump_json().encode())

    async def _watch_replicas(self) -> None:
        async for entry in self._resources.bus.kv(REPLICAS_BUCKET).watch():
            try:
                await self.driver.replica_changed(entry.key, entry.value)
            except Exception as error:
                _log.warning("cannot use the announcement of %s: %s", entry.key, error)

    async def _measure(self) -> None:
        while True:
            await self.database.read(measure)
            await asyncio.sleep(MEASURE_S)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sweep_every_s)
            await self.database.write(outbox.forget_published, self._now())
            removed = await sweep.sweep_once(
                self.database, self._resources.store, self._settings.sweep_after_s, self._now
            )
            if removed:
                _log.info("swept %d files that no row names", len(removed))


async def _forever(work: Callable[[], Awaitable[None]]) -> None:
    """Background work goes on after an error, such as a store that is away."""
    while True:
        try:
            await work()
        except asyncio.CancelledError:
            raise
        except Exception:
            _log.exception("background work failed, starting it again in %.0f s", RESTART_S)
            await asyncio.sleep(RESTART_S)


@asynccontextmanager
async def build(resources: Resources) -> AsyncIterator[CatalogApp]:
    # Whoever waits for an operation holds a connection, and gateways wait for thousands.
    open_files.allow_more()
    yield CatalogApp(resources, CatalogSettings())
