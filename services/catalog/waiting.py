"""Waiting for operations to be over, without a poll for each waiter.

In: requests that wait, and what transactions of this process say behind their commit. Out: they go on at once. Another
process's commits are seen by one query for all of them every second. Invariant: nobody waits longer than asked.
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
from services.catalog.operation_tables import OperationRow

__all__ = ["MAX_WAIT_S", "Waiters"]

MAX_WAIT_S = 60.0
POLL_S = 1.0
CHUNK = 500


class Waiters:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._events: dict[str, set[asyncio.Event]] = {}
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
        self._loop = asyncio.get_running_loop()
        event = asyncio.Event()
        self._events.setdefault(request_id, set()).add(event)
        try:
            yield event
        finally:
            watchers = self._events[request_id]
            watchers.discard(event)
            if not watchers:
                del self._events[request_id]

    async def run(self) -> None:
        """The net, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            waiting = list(self._events)
            for start in range(0, len(waiting), CHUNK):
                self._wake(await self._database.read(_over, waiting[start : start + CHUNK]))

    def _wake(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            for event in self._events.get(request_id, ()):
                event.set()


def _over(session: Session, request_ids: list[str]) -> list[str]:
    query = select(OperationRow.request_id).where(OperationRow.request_id.in_(request_ids))
    return list(session.scalars(query.where(OperationRow.done_at.is_not(None))))
