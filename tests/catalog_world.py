"""A catalog on a real bus, with fake workers and a fake replica: only what they compute is made up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from mint_schemas import Envelope, headers_for
from mint_schemas.cloudevents import run_id_for
from mint_schemas.commands import EvaluationRequested, ExportRequested, RolloutRequested, UpdateRequested
from mint_schemas.common import FileRef
from prometheus_client import CollectorRegistry

from services.catalog.app import CatalogApp
from services.catalog.config import CatalogSettings
from shared.bus import Bus
from shared.catalog.api import JournalEntry, Result, RunView
from shared.catalog.client import CatalogClient
from shared.ending import end
from shared.errors import Retryable
from shared.residency import REPLICAS_BUCKET, RESIDENCY_BUCKET, Desired, FailedRevision, ReadyRevision, Replica
from shared.service import Resources
from shared.settings import CommonSettings
from shared.store.memory import MemoryStore
from shared.worker import serve_commands
from tests.catalog_kit import TINY, FakeWorker, bases_by_name, put_nothing

MODELS = {
    "mint.v1.rollout.requested": RolloutRequested,
    "mint.v1.update.requested": UpdateRequested,
    "mint.v1.export.requested": ExportRequested,
    "mint.v1.evaluation.requested": EvaluationRequested,
}
TOKEN = "tiny-llama"


class World:
    """Everything around one catalog. `before` runs before each job and may raise or wait."""

    def __init__(self, directory: Path, make_bus: Callable[[], Bus], settings: CatalogSettings) -> None:
        self.directory, self.make_bus, self.settings = directory, make_bus, settings
        self.bases = bases_by_name()
        self.store = MemoryStore()
        self.worker = FakeWorker()
        self.jobs: list[str] = []
        self.before: Callable[[Any], Awaitable[None]] = _nothing
        self.broken: dict[str, str] = {}
        self.deaf = False
        self.app: CatalogApp
        self.client: CatalogClient
        self._tasks: list[asyncio.Task[None]] = []

    async def bus(self) -> Bus:
        bus = self.make_bus()
        await bus.connect()
        return bus

    async def start_catalog(self) -> None:
        self.catalog_bus = await self.bus()
        self.app = CatalogApp(self.resources("catalog", self.catalog_bus), self.settings)
        api = FastAPI()
        for router in self.app.routers:
            api.include_router(router)
        self.client = CatalogClient("http://catalog", transport=httpx.ASGITransport(api))
        await self.app.start()

    async def stop_catalog(self) -> None:
        await self.catalog_bus.drain()
        await self.app.stop()
        await self.client.close()

    def resources(self, name: str, bus: Any) -> Resources:
        common = CommonSettings(data_dir=self.directory, worker_id=f"{name}-1", heartbeat_s=0.2)
        client = getattr(self, "client", None)
        return Resources(name, common, bus, self.store, client, self.bases, CollectorRegistry(), "")  # type: ignore[arg-type]

    async def start_workers(self, bus: Any = None) -> None:
        bus = bus or await self.bus()
        for type_, model in MODELS.items():
            await serve_commands(self.resources("worker", bus), type_, model, self._job, [TINY])

    async def _job(self, command: Any, files: Any, lease: Any) -> Result:
        self.jobs.append(command.command_id.split(":", 1)[1])
        await self.before(command)
        lease.check()
        made: list[tuple[str, bytes]] = []

        def put(key: str, data: bytes) -> FileRef:
            made.append((key, data))
            return put_nothing(key, data)

        self.worker.put = put
        result = self.worker.result(command, self.bases[TINY])
        for key, data in made:
            await self.store.put(key, data)
        return result

    async def start_replica(self) -> None:
        bus = await self.bus()
        self._tasks.append(asyncio.create_task(self._replica(bus)))

    async def _replica(self, bus: Bus) -> None:
        async for entry in bus.kv(RESIDENCY_BUCKET).watch(resync_s=0.5):
            if entry.value is None or self.deaf:
                continue
            wanted = Desired.model_validate_json(entry.value).entries
            await self.announce(bus, [e for e in wanted if e.revision not in self.broken])

    async def announce(self, bus: Bus, ready: list[Any]) -> None:
        replica = Replica(
            replica="r1",
            boot_id="b1",
            url="http://r1",
            base=TINY,
            token=TOKEN,
            engine="fake",
            dtype="float32",
            max_rank=32,
            slots=4,
            max_resident=8,
            ready=tuple(ReadyRevision(revision=e.revision, adapter_sha256=e.adapter_sha256) for e in ready),
            failed=tuple(FailedRevision(revision=r, reason=why) for r, why in self.broken.items()),
            at=time.time(),
        )
        await bus.kv(REPLICAS_BUCKET).put(f"{TOKEN}.r1", replica.model_dump_json().encode())

    async def train(self, body: dict[str, Any], id: str = "request-1", replay: int | None = None) -> str:
        """As a product system would: core client, headers by hand. Returns the run's id."""
        envelope = Envelope("mint.v1.train.requested", "shop", id, traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
        js = self.catalog_bus._js()
        await js.publish(
            f"mint.v1.train.requested.{TOKEN}", json.dumps(body).encode(), headers=headers_for(envelope, replay)
        )
        return run_id_for("shop", id)

    async def until(self, run_id: str, *states: str, timeout_s: float = 30) -> RunView:
        deadline = time.monotonic() + timeout_s
        view: RunView | None = None
        while time.monotonic() < deadline:
            try:
                view = await self.client.run(run_id)
            except Exception:
                view = None
            if view is not None and view.state in states:
                return view
            await asyncio.sleep(0.05)
        raise AssertionError(f"{run_id} is not {states} after {timeout_s} s: {view}; jobs: {self.jobs}")

    async def journal(self, run_id: str) -> list[JournalEntry]:
        return await self.client.journal(run_id)

    async def messages(self, stream: str) -> list[Any]:
        """Every message that is on a stream now."""
        js = self.catalog_bus._js()
        info = await js.stream_info(stream)
        found = []
        for seq in range(info.state.first_seq, info.state.last_seq + 1):
            try:
                found.append(await js.get_msg(stream, seq=seq))
            except Exception as error:
                if "no message found" not in str(error):
                    raise
        return found

    async def close(self) -> None:
        await end(*self._tasks)
        await self.stop_catalog()


async def _nothing(command: Any) -> None:
    return None


@asynccontextmanager
async def open_world(directory: Path, make_bus: Callable[[], Bus], **settings: Any) -> AsyncIterator[World]:
    """Catalog, workers and replica."""
    world = World(directory, make_bus, CatalogSettings(**settings))
    await world.start_catalog()
    try:
        yield world
    finally:
        await world.close()


class LosesPublications:
    """A worker's bus whose first publication of each kind is lost, as if it was killed after the row."""

    def __init__(self, bus: Bus) -> None:
        self._bus, self.lost = bus, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, type: str, id: str, *args: Any, **kwargs: Any) -> Any:
        if id not in self.lost:
            self.lost.append(id)
            raise Retryable("killed after the row", delay_s=0.05)
        return await self._bus.publish(type, id, *args, **kwargs)
