"""One replica put together: engine, loads, working set, routes and announcements, started in order.

In: a base model, where the replica may keep files, and the bus, store and catalog that it uses. Out:
what the service shell runs. Invariant: a directory belongs to one living replica; a second one that is
given the same name refuses to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import APIRouter

from services.serving.announce import Announcer, ReadyEvents
from services.serving.desire import DesiredFollower
from services.serving.fetch import AdapterFiles
from services.serving.limits import LimitSettings, RequestLimits
from services.serving.loader import Loader, Revisions
from services.serving.residency import Limits, Residency
from services.serving.routes import make_router
from services.serving.sampling import Sampler
from services.serving.status import Identity, Status
from services.serving.supervise import CreateEngine, Supervisor
from services.serving.turns import TurnBounds, Turns
from shared.bus.bus import Bus
from shared.ending import end
from shared.errors import Fatal
from shared.store.port import ObjectStore

MEASURE_EVERY_S = 2.0
DRAIN_S = 5.0
"""How long a shutdown waits for requests in flight."""


@dataclass(frozen=True)
class Surroundings:
    """What a replica uses and does not own."""

    bus: Bus
    store: ObjectStore
    revisions: Revisions


@dataclass(frozen=True)
class Options:
    """`disk_bytes` bounds the adapter files kept in `directory`."""

    directory: Path
    limits: Limits
    disk_bytes: int = 20 * 2**30
    load_attempts: int = 3
    poll_s: float = 2.0
    backoff_s: float = 1.0
    turns: TurnBounds = field(default_factory=TurnBounds)
    requests: LimitSettings = field(default_factory=LimitSettings)


class ServingReplica:
    """A `ServiceApp`."""

    def __init__(self, identity: Identity, around: Surroundings, create: CreateEngine, options: Options) -> None:
        self.supervisor = Supervisor(create, options.poll_s, options.backoff_s)
        self.files = AdapterFiles(around.store, options.directory / "adapters", options.disk_bytes, self._digests)
        loader = Loader(around.revisions, self.files, options.load_attempts, options.limits.memory_bytes)
        self.events = ReadyEvents(around.bus, identity, self.supervisor)
        self.residency = Residency(self.supervisor, loader, options.limits, self.events.ready, self._busy)
        turns, limits = Turns(options.turns), RequestLimits(options.requests)
        self.sampler = Sampler(self.supervisor, self.residency, identity.name, turns, limits)
        self.status = Status(identity, self.supervisor, self.residency, self.sampler, self.files)
        self.desired = DesiredFollower(around.bus, identity.base.token, self.residency)
        self.announcer = Announcer(around.bus, identity, self.status, self.residency)
        self.routers: list[APIRouter] = [make_router(self.sampler, self.status, identity.base.name)]
        self._directory = options.directory
        self._kept = contextlib.ExitStack()
        self._measuring: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns at once; `healthy` says when it serves. Raises Fatal when the directory is taken."""
        self._kept.enter_context(only_one(self._directory))
        self.supervisor.start(self.residency)
        self.residency.queue.start()
        self.events.start()
        self.desired.start()
        self.announcer.start()
        self._measuring = asyncio.create_task(self._measure(), name="measure")

    async def stop(self) -> None:
        """First callers stop coming, then those in flight may end, then loads and the engine stop."""
        await self.announcer.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self.sampler.idle.wait()
        await self.desired.stop()
        await self.residency.queue.stop()
        await self.events.stop()
        await end(self._measuring)
        await self.supervisor.stop()
        self._kept.close()

    def healthy(self) -> str | None:
        if self.supervisor.running() is None:
            return self.supervisor.reason
        restoring = self.residency.restoring()
        if restoring:
            return f"restoring the working set: {', '.join(restoring[:5])}"
        return self.desired.waits_for()

    async def _measure(self) -> None:
        while True:
            await self.status.measure()
            await asyncio.sleep(MEASURE_EVERY_S)

    def _busy(self) -> bool:
        return self.sampler.in_flight > self.sampler.waiting

    def _digests(self) -> set[str]:
        return self.residency.digests()


@contextlib.contextmanager
def only_one(directory: Path) -> Iterator[None]:
    """Hold the directory's lock; the system lets go of it when the process ends, however it ends."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Fatal(
                f"another serving replica uses {directory}; give this one its own name (MINT_SERVING_REPLICA)"
            ) from error
        yield
