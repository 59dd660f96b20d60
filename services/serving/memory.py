"""The memory tier: which revisions are in the engine, held by whom, and what leaves when room is needed.

In flow loaded revisions, out flow places for more, bounded by count and by bytes. Invariants: a revision
with a hold is never unloaded; a pinned one neither, as long as the next load fits beside the pinned ones;
room is counted by one reader at a time, and what is being loaded has its place already.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from services.serving.errors import QueueFull
from services.serving.eviction import Eviction
from services.serving.fetch import Found
from services.serving.loader import Loaded
from shared.engine.port import EngineDead, ResidentAdapter

logger = logging.getLogger(__name__)


UNLOAD_AGAIN_S = 0.1


@dataclass(eq=False)
class Resident:
    """`draining`: it leaves when its holds end; new requests for it queue like any cold load, so that
    a hot revision cannot keep a cold one out for ever. `fresh`: not held yet; those who waited for it hold
    it first. `found`: the tier that it was loaded from."""

    loaded: Loaded
    found: Found
    holds: int = 0
    draining: bool = False
    fresh: bool = True
    used: float = field(default_factory=time.monotonic)

    @property
    def revision(self) -> str:
        return self.loaded.proof.revision

    @property
    def bytes(self) -> int:
        return self.loaded.manifest.adapter_bytes


class MemoryTier:
    """`capacity` in revisions; `room_wait_s` bounds the wait for a revision in use to drain."""

    def __init__(self, capacity: int, max_bytes: int, eviction: Eviction, room_wait_s: float) -> None:
        self._capacity, self._max_bytes = capacity, max_bytes
        self._eviction, self._room_wait_s = eviction, room_wait_s
        self._entries: dict[str, Resident] = {}
        self._coming: dict[str, int] = {}
        self._leaving: list[Resident] = []
        self._awaited: Counter[str] = Counter()
        self._counting = asyncio.Lock()
        self._freed = asyncio.Event()
        self.wanted: frozenset[str] = frozenset()
        self.pinned: tuple[str, ...] = ()
        self.changed = asyncio.Event()

    def entries(self) -> list[Resident]:
        return list(self._entries.values())

    def get(self, revision: str) -> Resident | None:
        return self._entries.get(revision)

    def bytes(self) -> int:
        return sum(entry.bytes for entry in self._entries.values())

    def fits(self, sizes: Collection[int]) -> bool:
        """Whether revisions of so many bytes could all come now without another's leaving; one place is left."""
        count = len(self._entries) + len(self._coming) + len(sizes)
        return count < self._capacity and self._bytes_taken() + sum(sizes) <= self._max_bytes

    def has_place(self, revision: str) -> bool:
        return revision in self._entries or revision in self._coming

    def asking(self, revision: str) -> int:
        """How many are about to hold it."""
        return self._awaited[revision]

    def digests(self) -> set[str]:
        """The adapters whose files an engine may still read."""
        return {entry.loaded.proof.adapter_sha256 for entry in (*self._entries.values(), *self._leaving)}

    def hold(self, revision: str) -> Resident | None:
        """None while it is not resident, or is on its way out."""
        entry = self._entries.get(revision)
        if entry is None or entry.draining:
            return None
        entry.holds += 1
        entry.fresh = False
        self._used(entry)
        self._freed.set()
        return entry

    def let_go(self, entry: Resident) -> None:
        entry.holds -= 1
        self._used(entry)
        self._freed.set()

    @contextmanager
    def awaited(self, revision: str) -> Iterator[None]:
        """Someone is about to hold it: it is as good as in use."""
        self._awaited[revision] += 1
        try:
            yield
        finally:
            self._awaited[revision] -= 1
            if not self._awaited[revision]:
                del self._awaited[revision]
            self._freed.set()

    @asynccontextmanager
    async def room(self, revision: str, size: int) -> AsyncIterator[None]:
        """A place for `size` bytes while the context is open, or until `add` takes it.

        Raises QueueFull when every place stays pinned or in use."""
        async with self._counting:
            await self._make_room(size)
            self._coming[revision] = size
        try:
            yield
        finally:
            self._coming.pop(revision, None)
            self.notify()

    def add(self, entry: Resident) -> None:
        self._coming.pop(entry.revision, None)
        self._entries[entry.revision] = entry
        self.notify()

    def drop(self, loaded: Loaded) -> None:
        """The engine does not have it any more."""
        entry = self._entries.get(loaded.proof.revision)
        if entry is not None and entry.loaded is loaded:
            del self._entries[entry.revision]
            self.notify()

    def clear(self) -> list[str]:
        """Nothing is resident any more; gives what was, most recently used first."""
        recent = sorted(self._entries.values(), key=lambda entry: entry.used, reverse=True)
        self._entries.clear()
        self._leaving.clear()
        self.notify()
        return [entry.revision for entry in recent]

    def missed(self, before: list[Resident], listed: list[ResidentAdapter]) -> list[Resident]:
        """Those of `before`, resident when the engine was asked, that it does not list and nobody unloads."""
        names = {adapter.revision for adapter in listed}
        return [e for e in before if e.revision not in names and self._entries.get(e.revision) is e]

    async def drained(self, revision: str) -> Resident | None:
        """The entry, or None, once it is no longer on its way out."""
        while (entry := self._entries.get(revision)) is not None and entry.draining:
            await self._wait_freed(1.0)
        return entry

    def notify(self) -> None:
        self._freed.set()
        self.changed.set()

    async def _make_room(self, size: int) -> None:
        deadline = time.monotonic() + self._room_wait_s
        chosen: Resident | None = None
        try:
            while self._is_full(size):
                victims = self._victims(size)
                idle = next((entry for entry in victims if self._is_idle(entry)), None)
                if idle is not None and await self._unload(idle):
                    continue
                if not victims or time.monotonic() >= deadline:
                    raise QueueFull(
                        f"all {len(self._entries)} resident revisions ({self.bytes()} bytes) are pinned or in use; "
                        "try again"
                    )
                if idle is None:
                    chosen = self._drain(victims, chosen)
                await self._wait_freed(min(deadline - time.monotonic(), UNLOAD_AGAIN_S if idle else 1.0))
        finally:
            if chosen is not None:
                chosen.draining = False

    def _drain(self, victims: list[Resident], chosen: Resident | None) -> Resident | None:
        """The one that is to drain: `chosen` as long as it may leave."""
        if chosen in victims:
            return chosen
        if chosen is not None:
            chosen.draining = False
        chosen = next((entry for entry in victims if not entry.fresh), None)
        if chosen is not None:
            chosen.draining = True
        return chosen

    def _is_full(self, size: int) -> bool:
        count = len(self._entries) + len(self._coming)
        return count >= self._capacity or self._bytes_taken() + size > self._max_bytes

    def _bytes_taken(self) -> int:
        return self.bytes() + sum(self._coming.values())

    def _victims(self, size: int) -> list[Resident]:
        """Unpinned revisions, first to go first: what nobody wants, then what is worth least."""
        pinned = self._protected(size)
        found = [entry for entry in self._entries.values() if entry.revision not in pinned]
        return sorted(found, key=lambda e: (e.revision in self.wanted, self._eviction.worth(e.revision)))

    def _is_idle(self, entry: Resident) -> bool:
        return not entry.holds and (entry.draining or not self._awaited[entry.revision])

    def _protected(self, size: int) -> set[str]:
        """The pinned revisions, most urgent first, as far as `size` bytes fit beside them."""
        left, found = self._max_bytes - size, set()
        for revision in self.pinned:
            entry = self._entries.get(revision)
            if entry is not None and entry.bytes <= left:
                left -= entry.bytes
                found.add(revision)
        return found

    async def _unload(self, entry: Resident) -> bool:
        """Out of the table first, so that no request can start on what is leaving; False and back in it when
        the engine does not let go of it."""
        del self._entries[entry.revision]
        self._leaving.append(entry)
        self.notify()
        try:
            await entry.loaded.engine.unload(entry.revision)
        except EngineDead:
            raise
        except Exception as error:
            logger.warning("%s cannot be unloaded: %r", entry.revision, error)
            # Not after `clear`: that engine, and all that it held, is gone.
            if entry in self._leaving:
                self._entries.setdefault(entry.revision, entry)
            return False
        finally:
            if entry in self._leaving:
                self._leaving.remove(entry)
        logger.info("%s unloaded to make room", entry.revision)
        return True

    def _used(self, entry: Resident) -> None:
        entry.used = time.monotonic()
        self._eviction.used(entry.revision)

    async def _wait_freed(self, timeout_s: float) -> None:
        self._freed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._freed.wait()
        except TimeoutError:
            return
