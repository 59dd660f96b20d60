"""The working set of this replica: what requests hold, what the catalog wants, and how it gets there.

In flow desired residency and requests; out flow holds on proved revisions. Invariants: a revision in use
is neither unloaded nor are its files removed, from the end of its fetch on; what is no longer desired
stays until its room is needed; a load that fails changes nothing for the revisions that serve.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from services.serving.backlog import Asker
from services.serving.errors import EngineDown, LoadFailed, QueueFull, Unavailable
from services.serving.eviction import EvictionName, make_eviction
from services.serving.failures import Failures
from services.serving.loader import Fetched, Loaded, Loader
from services.serving.loads import LoadBounds, LoadScheduler
from services.serving.memory import MemoryTier, Resident
from services.serving.pace import Pace
from services.serving.preload import Preloads
from services.serving.supervise import Supervisor
from services.serving.wanted import Wanted
from shared.engine.port import EngineDead, InferenceEngine, NotResident, ResidentAdapter
from shared.residency import Desired
from shared.sampling.port import INTERACTIVE, PREWARM
from shared.telemetry.metrics import ACTIVATE_SECONDS, FETCH_SECONDS, HOLDS

logger = logging.getLogger(__name__)

OnReady = Callable[[Loaded], None]
RESTORE_AGAIN_S = 2.0
Tier = Literal["slot", "memory", "disk", "catalog"]


@dataclass(frozen=True)
class Limits:
    """`capacity` in revisions and `memory_bytes` bound the memory tier; the times are in seconds. `fetch_s` bounds one
    fetch: a download that hangs gives its worker back."""

    capacity: int
    memory_bytes: int = 4 * 2**30
    eviction: EvictionName = "lru"
    queue_depth: int = 64
    fetches: int = 4
    activations: int = 1
    activation_share: float = 0.5
    load_wait_s: float = 120.0
    room_wait_s: float = 30.0
    fetch_s: float = 300.0

    @property
    def bounds(self) -> LoadBounds:
        return LoadBounds(self.queue_depth, self.fetches, self.activations)


class Residency:
    """`busy` says whether requests run on the engine now: they are what activations are paced for."""

    def __init__(
        self, supervisor: Supervisor, loader: Loader, limits: Limits, on_ready: OnReady, busy: Callable[[], bool]
    ) -> None:
        self._supervisor, self._loader, self._limits, self._on_ready = supervisor, loader, limits, on_ready
        self._lost: list[str] = []
        self._wanted = Wanted(limits.capacity, limits.memory_bytes)
        self._slots: set[str] = set()
        self._restoring = False
        self.failures = Failures()
        self.memory = MemoryTier(
            limits.capacity,
            limits.memory_bytes,
            make_eviction(limits.eviction, limits.capacity),
            limits.room_wait_s,
        )
        self._preloads = Preloads(self.memory, self._wanted, self._preload, limits.bounds.ahead)
        self.queue = LoadScheduler(self, limits.bounds, Pace(limits.activation_share, busy))
        self.changed = self.memory.changed

    @asynccontextmanager
    async def hold(
        self, revision: str, priority: int = INTERACTIVE, tenant: str = "", wait_s: float | None = None
    ) -> AsyncIterator[Loaded]:
        """A proved revision that stays resident while the context is open; loads it if need be, as
        urgently as `priority` says and in the turns of `tenant` (empty: of the revision's own), and waits
        up to `wait_s` seconds for that (None: the replica's own bound).

        Raises the `Problem` that says why it cannot be served now."""
        entry, tier = await self._held(revision, Asker(priority, tenant or _tenant_of(revision)), wait_s)
        HOLDS.labels(entry.loaded.engine.capabilities().base_name, tier).inc()
        try:
            yield entry.loaded
        finally:
            self.memory.let_go(entry)

    async def want(self, desired: Desired) -> None:
        """Take over what the catalog wants."""
        self._wanted.take(desired)
        self.memory.pinned = self._wanted.pinned
        self.memory.wanted = frozenset(self.wanted())
        for entry in self.memory.entries():
            await self._pin(entry.loaded)
        self.memory.notify()

    def missing(self) -> list[str]:
        """What is wanted, neither resident nor refused, most urgent first; what need not be kept only while
        nothing would leave for it."""
        kept, others = self.missing_kept(), self._absent(self._wanted.if_there_is_room)
        return kept + [revision for revision in others if self._preloads.has_room(revision)]

    def missing_kept(self) -> list[str]:
        """Of those, what is to be kept."""
        return self._absent(self.wanted())

    async def preload(self, revisions: Iterable[str], enough: Callable[[], bool] = lambda: False) -> None:
        """Load without a request, in order; what does not work is in `failures` or the log. No further one is begun
        once it is `enough`, and none that is preloaded already."""
        await self._preloads.run(revisions, enough, join=False)

    def lost(self) -> None:
        """The engine died: nothing is resident; remember what was, most recently used first."""
        recent = self.memory.clear()
        self._lost = recent + [r for r in self._lost if r not in recent]
        self._restoring = True
        self._slots.clear()

    async def restore(self) -> None:
        """Bring back the working set that the dead engine had, wanted revisions first, then by last use. What the
        catalog or the store was away for is tried again until the next engine's turn."""
        self._restoring = True
        while self._lost:
            self.memory.notify()
            lost = sorted(self._lost, key=lambda revision: revision not in self.memory.wanted)
            self._lost = await self._preloads.run(lost[: self._limits.capacity], lambda: False, join=True)
            self._restoring = False
            if self._lost:
                await asyncio.sleep(RESTORE_AGAIN_S)
        self._restoring = False
        self.memory.notify()

    def restoring(self) -> list[str]:
        """What keeps the replica from being healthy; not what waits for a catalog that is away."""
        if not self._restoring:
            return []
        return [r for r in self._lost if self.memory.get(r) is None and not self.failures.refused(r)]

    def wanted(self) -> list[str]:
        """What the catalog wants kept here, most urgent first."""
        return self._wanted.revisions()

    def residents(self) -> list[Resident]:
        return self.memory.entries()

    def prewarming(self) -> list[str]:
        return [r for r in self.queue.waiting() if self.memory.get(r) is None]

    def digests(self) -> set[str]:
        """The adapters whose files must stay on disk."""
        return self.memory.digests() | self.queue.digests()

    def forget(self, loaded: Loaded) -> None:
        """The engine says that it does not have it: believe the engine."""
        self.memory.drop(loaded)

    def reconcile(self, before: list[Resident], listed: list[ResidentAdapter]) -> None:
        """Believe the engine's own list; `before` is what was resident when it was asked."""
        self._slots = {adapter.revision for adapter in listed if adapter.in_slot}
        for entry in self.memory.missed(before, listed):
            logger.warning("the engine does not list %s any more; it is loaded again when asked for", entry.revision)
            self.memory.drop(entry.loaded)

    def near(self, revision: str) -> bool:
        return self._loader.near(revision)

    async def fetch(self, revision: str) -> Fetched | None:
        """The first stage of a load. Nothing is awaited after the files are there: from then on the load
        names them, and they stay."""
        entry = self.memory.get(revision)
        if entry is not None and not entry.draining:
            return None
        has = self._supervisor.engine().capabilities()
        self.memory.notify()
        started, outcome = time.monotonic(), "failed"
        try:
            fetched = await self._in_time(revision, self._loader.fetch(revision, has, self._wanted.digest(revision)))
            outcome = fetched.found
            self._wanted.learn(fetched.manifest)
            self.memory.wanted = frozenset(self.wanted())
        except (LoadFailed, Unavailable) as error:
            self.failures.add(revision, error)
            raise
        finally:
            FETCH_SECONDS.labels(has.base_name, outcome).observe(time.monotonic() - started)
            self.memory.notify()
        return fetched

    async def activate(self, fetched: Fetched, began: Callable[[], None]) -> None:
        """The second stage of a load."""
        revision = fetched.manifest.revision
        if await self.memory.drained(revision) is not None:
            return
        if self._preloads.is_uncalled_for(fetched.manifest):
            raise QueueFull(f"there is no room left for {revision}, which nobody asks for now")
        engine = self._supervisor.engine()
        asked = False
        try:
            async with self.memory.room(revision, fetched.manifest.adapter_bytes):
                engine, asked = self._supervisor.engine(), True
                began()
                await self._activated(fetched, engine)
        except EngineDead as error:
            self._supervisor.dead(engine)
            if asked:
                self.failures.killed(revision, error)
            raise EngineDown(
                f"the engine died while {revision} was loading and is being restarted; try again"
            ) from error
        except (LoadFailed, Unavailable) as error:
            self.failures.add(revision, error)
            raise
        finally:
            self.memory.notify()

    async def _activated(self, fetched: Fetched, engine: InferenceEngine) -> None:
        revision = fetched.manifest.revision
        started, outcome = time.monotonic(), "failed"
        try:
            loaded = await self._loader.activate(fetched, engine)
            if self._supervisor.running() is not engine:
                raise EngineDown(f"the engine was restarted while {revision} was loading; try again")
            outcome = "ready"
        finally:
            base = engine.capabilities().base_name
            ACTIVATE_SECONDS.labels(base, outcome).observe(time.monotonic() - started)
        self.memory.add(Resident(loaded, fetched.found))
        self._slots.add(revision)
        self.failures.clear(revision)
        await self._pin(loaded)
        self._on_ready(loaded)

    async def _held(self, revision: str, asker: Asker, wait_s: float | None) -> tuple[Resident, Tier]:
        """And the tier that it was found in; a slot by the engine's own list when it was last asked."""
        deadline = time.monotonic() + (self._limits.load_wait_s if wait_s is None else wait_s)
        waited = False
        with self.memory.awaited(revision):
            while (entry := self.memory.hold(revision)) is None:
                self.failures.check(revision)
                self._supervisor.engine()
                waited = True
                await self.queue.wait(revision, max(deadline - time.monotonic(), 0.0), asker)
        if waited:
            return entry, entry.found
        return entry, "slot" if revision in self._slots else "memory"

    def _absent(self, revisions: Iterable[str]) -> list[str]:
        return [r for r in revisions if self.memory.get(r) is None and not self.failures.refused(r)]

    async def _preload(self, revision: str) -> None:
        entry, _ = await self._held(revision, Asker(PREWARM, _tenant_of(revision)), None)
        self.memory.let_go(entry)

    async def _in_time(self, revision: str, fetch: Awaitable[Fetched]) -> Fetched:
        try:
            async with asyncio.timeout(self._limits.fetch_s):
                return await fetch
        except TimeoutError as error:
            raise Unavailable(f"the files of {revision} did not come within {self._limits.fetch_s:g} s") from error

    async def _pin(self, loaded: Loaded) -> None:
        try:
            await loaded.engine.pin(loaded.proof.revision, loaded.proof.revision in self.memory.pinned)
        except EngineDead:
            self._supervisor.dead(loaded.engine)
        except NotResident:
            self.forget(loaded)


def _tenant_of(revision: str) -> str:
    return revision.partition("/")[0]
