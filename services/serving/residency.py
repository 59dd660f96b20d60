"""The working set of this replica: what is resident, held, wanted, and what leaves when room is needed.

In flow desired residency and requests; out flow holds on proved revisions. Invariants: a revision with
a hold is never unloaded; a pinned one is never unloaded; what is no longer desired stays until its
room is needed; a load that fails changes nothing for the revisions that serve.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.serving.errors import EngineDown, LoadFailed, QueueFull, Unavailable
from services.serving.failures import Failures
from services.serving.loader import Loaded, Loader
from services.serving.loads import LoadQueue
from services.serving.supervise import Supervisor
from shared.engine.port import EngineDead, NotResident
from shared.residency import Desired
from shared.telemetry.metrics import LOAD_SECONDS

logger = logging.getLogger(__name__)

OnReady = Callable[[Loaded], None]


@dataclass
class Resident:
    """`draining`: it leaves when its holds end; new requests for it queue like any cold load, so that
    a hot revision cannot keep a cold one out for ever."""

    loaded: Loaded
    holds: int = 0
    draining: bool = False
    used: float = field(default_factory=time.monotonic)

    @property
    def revision(self) -> str:
        return self.loaded.proof.revision


@dataclass(frozen=True)
class Limits:
    """`capacity` in revisions; the times in seconds."""

    capacity: int
    queue_depth: int = 64
    load_wait_s: float = 120.0
    room_wait_s: float = 30.0


class Residency:
    def __init__(self, supervisor: Supervisor, loader: Loader, limits: Limits, on_ready: OnReady) -> None:
        self._supervisor, self._loader, self._limits, self._on_ready = supervisor, loader, limits, on_ready
        self._resident: dict[str, Resident] = {}
        self._lost: list[str] = []
        self._waiting: dict[str, int] = {}
        self._freed = asyncio.Event()
        self._wanted: dict[str, str] = {}
        self._pinned: set[str] = set()
        self.failures = Failures()
        self.queue = LoadQueue(self._load, limits.queue_depth)
        self.changed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, revision: str) -> AsyncIterator[Loaded]:
        """A proved revision that stays resident while the context is open; loads it if need be.

        Raises the `Problem` that says why it cannot be served now."""
        entry = await self._held(revision)
        try:
            yield entry.loaded
        finally:
            entry.holds -= 1
            entry.used = time.monotonic()
            self._notify()

    async def want(self, desired: Desired) -> None:
        """Take over what the catalog wants: the most urgent `capacity` revisions; one place at least
        stays unpinned, so that a cold load always finds room."""
        # What does not fit is not pinned either: it would hold the place of something more urgent.
        ordered = sorted(desired.entries, key=lambda entry: entry.priority)[: self._limits.capacity]
        self._wanted = {entry.revision: entry.adapter_sha256 for entry in ordered}
        pins = [entry.revision for entry in ordered if entry.pinned]
        self._pinned = set(pins[: max(self._limits.capacity - 1, 0)])
        await self._pin_residents()
        self._notify()

    def missing(self) -> list[str]:
        """What is wanted, neither resident nor refused, most urgent first."""
        return [r for r in self._wanted if r not in self._resident and not self.failures.refused(r)]

    async def preload(self, revision: str) -> bool:
        """Load without a request; False when it did not work (the reason is in `failures` or the log)."""
        try:
            async with self.hold(revision):
                return True
        except Exception as error:
            logger.warning("%s is desired but not loaded: %s", revision, error)
            return False

    def lost(self) -> None:
        """The engine died: nothing is resident; remember what was, most recently used first."""
        recent = sorted(self._resident.values(), key=lambda entry: entry.used, reverse=True)
        self._lost = [entry.revision for entry in recent] + [r for r in self._lost if r not in self._resident]
        self._resident.clear()
        self._notify()

    async def restore(self) -> None:
        """Bring back the working set that the dead engine had, wanted revisions first, then by last use."""
        self._notify()
        lost = sorted(self._lost, key=lambda revision: revision not in self._wanted)
        for revision in lost[: self._limits.capacity]:
            await self.preload(revision)
        self._lost = []
        self._notify()

    def restoring(self) -> list[str]:
        return [r for r in self._lost if r not in self._resident and not self.failures.refused(r)]

    def wanted(self) -> list[str]:
        """What the catalog wants here, most urgent first."""
        return list(self._wanted)

    def residents(self) -> list[Resident]:
        return list(self._resident.values())

    def prewarming(self) -> list[str]:
        return [r for r in self.queue.waiting() if r not in self._resident]

    def digests(self) -> set[str]:
        """The adapters whose files an engine may still read."""
        return {entry.loaded.proof.adapter_sha256 for entry in self._resident.values()}

    def forget(self, loaded: Loaded) -> None:
        """The engine says that it does not have it: believe the engine."""
        entry = self._resident.get(loaded.proof.revision)
        if entry is not None and entry.loaded is loaded:
            del self._resident[loaded.proof.revision]
            self._notify()

    async def _held(self, revision: str) -> Resident:
        self._waiting[revision] = self._waiting.get(revision, 0) + 1
        deadline = time.monotonic() + self._limits.load_wait_s
        try:
            while True:
                entry = self._resident.get(revision)
                if entry is not None and not entry.draining:
                    entry.holds += 1
                    entry.used = time.monotonic()
                    return entry
                self.failures.check(revision)
                self._supervisor.engine()
                await self.queue.wait(revision, max(deadline - time.monotonic(), 0.0))
        finally:
            self._waiting[revision] -= 1
            if not self._waiting[revision]:
                del self._waiting[revision]

    async def _load(self, revision: str) -> None:
        """The queue's work: one load at a time, so that room is counted by one reader."""
        if revision in self._resident and not self._resident[revision].draining:
            return
        engine = self._supervisor.engine()
        self._notify()
        started, outcome = time.monotonic(), "failed"
        base = engine.capabilities().base_name
        try:
            loaded = await self._loader.load(revision, engine, self._make_room, self._wanted.get(revision))
            if self._supervisor.running() is not engine:
                raise EngineDown(f"the engine was restarted while {revision} was loading; try again")
            self._resident[revision] = Resident(loaded)
            self.failures.clear(revision)
            outcome = "ready"
            await self._pin(loaded)
            self._on_ready(loaded)
        except EngineDead as error:
            self._supervisor.dead(engine)
            self.failures.killed(revision, error)
            raise EngineDown(
                f"the engine died while {revision} was loading and is being restarted; try again"
            ) from error
        except (LoadFailed, Unavailable) as error:
            self.failures.add(revision, error)
            raise
        finally:
            LOAD_SECONDS.labels(base, outcome).observe(time.monotonic() - started)
            self._notify()

    async def _make_room(self) -> None:
        """Unload until one place is free. Raises QueueFull when every place stays pinned or in use."""
        deadline = time.monotonic() + self._limits.room_wait_s
        chosen: Resident | None = None
        try:
            while len(self._resident) >= self._limits.capacity:
                idle, busy = self._victims(idle=True), self._victims(idle=False)
                if idle:
                    await self._unload(idle[0])
                    continue
                if not busy or time.monotonic() >= deadline:
                    raise QueueFull(f"all {self._limits.capacity} resident revisions are pinned or in use; try again")
                if chosen is None:
                    chosen = busy[0]
                    chosen.draining = True
                await self._wait_freed(min(deadline - time.monotonic(), 1.0))
        finally:
            if chosen is not None:
                chosen.draining = False

    def _victims(self, idle: bool) -> list[Resident]:
        """Unpinned revisions, first to go first: what nobody wants, then the least recently used."""
        found = []
        for entry in self._resident.values():
            busy = entry.holds > 0 or (self._waiting.get(entry.revision, 0) > 0 and not entry.draining)
            if entry.revision not in self._pinned and busy != idle:
                found.append(entry)
        return sorted(found, key=lambda entry: (entry.revision in self._wanted, entry.used))

    async def _unload(self, entry: Resident) -> None:
        """Out of the table first, so that no request can start on what is leaving."""
        del self._resident[entry.revision]
        self._notify()
        await entry.loaded.engine.unload(entry.revision)
        logger.info("%s unloaded to make room", entry.revision)

    async def _pin_residents(self) -> None:
        for entry in list(self._resident.values()):
            await self._pin(entry.loaded)

    async def _pin(self, loaded: Loaded) -> None:
        try:
            await loaded.engine.pin(loaded.proof.revision, loaded.proof.revision in self._pinned)
        except EngineDead:
            self._supervisor.dead(loaded.engine)
        except NotResident:
            self.forget(loaded)

    async def _wait_freed(self, timeout_s: float) -> None:
        self._freed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._freed.wait()
        except TimeoutError:
            return

    def _notify(self) -> None:
        self._freed.set()
        self.changed.set()
