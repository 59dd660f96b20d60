"""The relay: publishes what committed transactions promised, in order, until the bus confirms it.

In: rows of `outbox` without a publication time. Out: messages. Invariant: nothing is dropped; while the
bus is away the rows wait, and afterwards they go out in the order in which they were written. A row that
cannot be published whatever the bus does stays, is logged, and holds up none of the others. A crash
between a publication and its mark publishes again under the same id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from services.catalog.clock import Clock
from services.catalog.database import Database
from services.catalog.tables import OutboxRow
from shared.errors import Fatal

Publish = Callable[[OutboxRow], Awaitable[object]]

BATCH = 100
IDLE_S = 1.0
MAX_BACKOFF_S = 5.0
KEEP_S = 7 * 86400.0

_log = logging.getLogger(__name__)


class Relay:
    """`wake` after a transaction that may have written rows; without it they go out within a second."""

    def __init__(self, database: Database, publish: Publish, clock: Clock) -> None:
        self._database, self._publish, self._clock = database, publish, clock
        self._woken = asyncio.Event()
        self._refused: set[int] = set()

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            self._woken.clear()
            try:
                sent = await self.publish_batch()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                failures += 1
                delay = min(MAX_BACKOFF_S, 0.2 * 2 ** min(failures, 10))
                _log.warning("cannot publish from the outbox, trying again in %.1f s: %s", delay, error)
                await asyncio.sleep(delay)
                continue
            failures = 0
            if sent == 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        await self._woken.wait()

    async def publish_batch(self) -> int:
        """Publish the oldest waiting rows in order; those that went out are marked even if a later one
        fails. Returns how many; raises what publishing raises."""
        rows = await self._database.read(_waiting)
        done: list[int] = []
        try:
            for row in rows:
                try:
                    await self._publish(row)
                except Fatal as error:
                    if row.seq not in self._refused:
                        _log.error("row %d of the outbox (%s %s) stays behind: %s", row.seq, row.type, row.ce_id, error)
                    self._refused.add(row.seq)
                    continue
                done.append(row.seq)
        finally:
            if done:
                await self._database.write(_mark, done, self._clock())
        return len(done)


def _waiting(session: Session) -> list[OutboxRow]:
    query = select(OutboxRow).where(OutboxRow.published_at.is_(None)).order_by(OutboxRow.seq).limit(BATCH)
    return list(session.scalars(query))


def _mark(session: Session, seqs: list[int], now: float) -> None:
    session.execute(update(OutboxRow).where(OutboxRow.seq.in_(seqs)).values(published_at=now))


def forget_published(session: Session, now: float) -> None:
    """Rows that went out long ago; what they said is in the journal and on the bus."""
    session.execute(delete(OutboxRow).where(OutboxRow.published_at < now - KEEP_S))
