"""Which samples of a sampler are over, in the order in which they ended: one question for all that a client waits for.

In: a sampler, a range of its clients' numbers, and a cursor. Out: what ended behind the cursor, and the next one.
Invariant: asking with the cursors that were answered, in turn, names every sample of the range once, whatever ended in
between; a cursor of a catalog that has since been put back to an older state begins again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import samplers
from services.catalog.database import Database
from services.catalog.operation_tables import OperationRow
from services.catalog.waiting import Waiters
from shared.catalog.operations import AwaitSamples, Content, EndedSample, SamplesEnded

__all__ = ["PAGE", "ended", "wait"]

PAGE = 1000


async def wait(database: Database, waiters: Waiters, sampler_id: str, request: AwaitSamples) -> SamplesEnded:
    """As soon as there is one, or what there is when the wait is over. Raises Refused (404)."""
    loop = asyncio.get_running_loop()
    until = loop.time() + request.wait_s
    while True:
        with waiters.watching_sampler(sampler_id) as one_more:
            found = await database.read(ended, sampler_id, request)
            if found.items or (left := until - loop.time()) <= 0:
                return found
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await one_more.wait()


def ended(session: Session, sampler_id: str, request: AwaitSamples) -> SamplesEnded:
    """At most a page."""
    sampler = samplers.find(session, sampler_id, request.tenant)
    after = request.after if request.after <= sampler.ended else 0
    rows = session.scalars(
        select(OperationRow)
        .where(OperationRow.sampler_id == sampler_id, OperationRow.ended > after)
        .where(OperationRow.seq_id.between(request.first, request.last))
        .order_by(OperationRow.ended)
        .limit(PAGE)
    ).all()
    items = tuple(EndedSample(request_id=row.request_id, failed=row.state == "failed", size=_size(row)) for row in rows)
    last = (rows[-1].ended or 0) if rows else after
    return SamplesEnded(items=items, cursor=last if len(rows) == PAGE else max(last, sampler.ended))


def _size(row: OperationRow) -> int | None:
    if row.result is None:
        return None
    result = Content.model_validate(row.result)
    return result.file.size if result.file is not None else len(result.inline or b"")
