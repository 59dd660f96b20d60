"""Waiting for operations to be over, or for the next sample of a sampler to be, without a poll for each waiter.

In: requests that wait, and what transactions of this process say behind their commit. Out: they go on at once. Another
process's commits are seen by one query for all of them every second. Whoever is woken looks for itself. Invariant:
nobody waits longer than asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import notices
from services.catalog.database import Database
from services.catalog.operation_tables import OperationRow, SamplerRow

__all__ = ["MAX_WAIT_S", "Waiters"]

MAX_WAIT_S = 60.0
POLL_S = 1.0
CHUNK = 500


class Waiters:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._events: dict[str, set[asyncio.Event]] = {}
        self._samplers: dict[str, set[asyncio.Event]] = {}
        self._ended: dict[str, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def committed(self, told: Mapping[Any, Any]) -> None:
        """From any thread."""
        ended = notices.ended_in(told)
        if ended and self._loop is not None:
            with suppress(RuntimeError):  # the loop has closed, and nobody waits any more
                self._loop.call_soon_threadsafe(self._wake, ended)

    @contextmanager
    def watching(self, request_id: str) -> Iterator[asyncio.Event]:
        """An event that is set when the operation ends from here on; look at it within, then wait."""
        with self._watching(self._events, request_id) as event:
            yield event

    @contextmanager
    def watching_sampler(self, sampler_id: str) -> Iterator[asyncio.Event]:
        """The same, when a sample of the sampler ends; it may also be set without one."""
        with self._watching(self._samplers, sampler_id) as event:
            yield event

    @contextmanager
    def _watching(self, shelf: dict[str, set[asyncio.Event]], name: str) -> Iterator[asyncio.Event]:
        self._loop = asyncio.get_running_loop()
        event = asyncio.Event()
        shelf.setdefault(name, set()).add(event)
        try:
            yield event
        finally:
            watchers = shelf[name]
            watchers.discard(event)
            if not watchers:
                del shelf[name]

    async def run(self) -> None:
        """The net, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            for names in _chunks(self._events):
                self._wake(await self._database.read(_over, names))
            for names in _chunks(self._samplers):
                found = await self._database.read(_ended, names)
                self._wake([name for name, ended in found.items() if self._ended.get(name) != ended])
                self._ended |= found
            self._ended = {name: ended for name, ended in self._ended.items() if name in self._samplers}

    def _wake(self, names: list[str]) -> None:
        for name in names:
            for event in (*self._events.get(name, ()), *self._samplers.get(name, ())):
                event.set()


def _chunks(shelf: Mapping[str, object]) -> Iterator[list[str]]:
    waiting = list(shelf)
    for start in range(0, len(waiting), CHUNK):
        yield waiting[start : start + CHUNK]


def _over(session: Session, request_ids: list[str]) -> list[str]:
    query = select(OperationRow.request_id).where(OperationRow.request_id.in_(request_ids))
    return list(session.scalars(query.where(OperationRow.done_at.is_not(None))))


def _ended(session: Session, sampler_ids: list[str]) -> dict[str, int]:
    query = select(SamplerRow.sampler_id, SamplerRow.ended).where(SamplerRow.sampler_id.in_(sampler_ids))
    return {row.sampler_id: row.ended for row in session.execute(query)}
