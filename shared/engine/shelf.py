"""The working set of one engine: which revisions are resident, pinned, in flight, and what goes next.

Engines ask it before they touch an adapter; it decides, they act. A revision gets a handle (an integer
that is never used again in the process) when it is loaded.

Invariant: what is pinned or in flight is never removed, and the number of resident revisions never
passes `capacity`, so that no library's own eviction ever runs.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shared.adapters.manifest import Manifest
from shared.engine.port import EngineError, LoadReport, NotResident, ResidentAdapter, SlotsExhausted

Install = Callable[[int], Awaitable[LoadReport]]
Remove = Callable[[int], Awaitable[None]]


@dataclass
class Entry:
    handle: int
    report: LoadReport
    bytes: int
    pinned: bool = False
    in_flight: int = 0
    used: float = field(default_factory=time.monotonic)


class Shelf:
    def __init__(self, capacity: int, remove: Remove) -> None:
        self._capacity = capacity
        self._remove = remove
        self._entries: dict[str, Entry] = {}
        self._handles = itertools.count(1)
        self._changing = asyncio.Lock()

    def handle(self) -> int:
        """A fresh handle."""
        return next(self._handles)

    async def load(self, manifest: Manifest, install: Install) -> LoadReport:
        """Make room, then `install(handle)`. A resident revision answers with its first report.

        `install` leaves nothing behind when it raises. Raises SlotsExhausted, and EngineError for a
        revision that is resident with other bytes. A caller that gives up does not stop a load half-way."""
        return await asyncio.shield(self._load(manifest, install))

    async def _load(self, manifest: Manifest, install: Install) -> LoadReport:
        async with self._changing:
            held = self._entries.get(manifest.revision)
            if held is not None:
                if held.report.adapter_sha256 != manifest.adapter_sha256:
                    raise EngineError(
                        f"{manifest.revision} is resident as adapter {held.report.adapter_sha256}, "
                        f"not {manifest.adapter_sha256}; a revision never changes"
                    )
                return held.report
            await self._make_room()
            handle = self.handle()
            report = await install(handle)
            self._entries[manifest.revision] = Entry(handle, report, manifest.adapter_bytes)
            return report

    async def unload(self, revision: str) -> None:
        """Raises EngineError while requests are in flight on it."""
        await asyncio.shield(self._unload(revision))

    async def _unload(self, revision: str) -> None:
        async with self._changing:
            entry = self._entries.get(revision)
            if entry is None:
                return
            if entry.in_flight:
                raise EngineError(f"{revision} has {entry.in_flight} requests in flight; unload it when they end")
            await self._drop(revision)

    def pin(self, revision: str, pinned: bool) -> None:
        self._entry(revision).pinned = pinned

    @contextmanager
    def hold(self, revision: str) -> Iterator[int]:
        """Protect a revision from removal while a request runs on it; gives its handle."""
        entry = self._entry(revision)
        entry.in_flight += 1
        try:
            yield entry.handle
        finally:
            entry.in_flight -= 1
            entry.used = time.monotonic()

    def entries(self) -> dict[str, Entry]:
        return dict(self._entries)

    def resident(self, in_slot: Callable[[int], bool]) -> list[ResidentAdapter]:
        return [
            ResidentAdapter(
                revision=revision,
                adapter_sha256=entry.report.adapter_sha256,
                pinned=entry.pinned,
                in_slot=in_slot(entry.handle),
                in_flight=entry.in_flight,
                bytes=entry.bytes,
            )
            for revision, entry in self._entries.items()
        ]

    def _entry(self, revision: str) -> Entry:
        entry = self._entries.get(revision)
        if entry is None:
            raise NotResident(f"{revision} is not loaded in this engine; load it, then sample")
        return entry

    async def _make_room(self) -> None:
        while len(self._entries) >= self._capacity:
            free = [(e.used, r) for r, e in self._entries.items() if not e.pinned and not e.in_flight]
            if not free:
                raise SlotsExhausted(
                    f"all {self._capacity} resident adapters are pinned or in use; unload or unpin one, then retry"
                )
            await self._drop(min(free)[1])

    async def _drop(self, revision: str) -> None:
        """Out of the table first, so that no request can start on what is being removed."""
        entry = self._entries.pop(revision)
        await self._remove(entry.handle)
