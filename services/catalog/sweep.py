"""Which stored files a row names, for the sweeper: all others of a day's age are removed.

Invariant: nothing that is named is removed, and nothing that may yet be named: files of a run that is not
over, and, while any run is active, blobs, since an export may be about to name one that is there already.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import runs
from services.catalog.clock import Clock
from services.catalog.database import Database
from services.catalog.tables import FileRow, RunRow
from shared.store.keys import ATTEMPTS, BLOBS
from shared.store.port import ObjectStore
from shared.store.sweep import sweep


def kept(session: Session, keys: list[str]) -> set[str]:
    """The keys that stay."""
    named = set(session.scalars(select(FileRow.key).where(FileRow.key.in_(keys))))
    unfinished = set(session.scalars(select(RunRow.run_id).where(RunRow.state.not_in(runs.ENDED))))
    return {key for key in keys if key in named or _pending(key, unfinished)}


def _pending(key: str, unfinished: set[str]) -> bool:
    if key.startswith(ATTEMPTS):
        return key.removeprefix(ATTEMPTS).split("/", 1)[0] in unfinished
    return key.startswith(BLOBS) and bool(unfinished)


async def sweep_once(database: Database, store: ObjectStore, older_than_s: float, clock: Clock) -> list[str]:
    """Returns the keys that were removed."""

    async def named(keys: list[str]) -> set[str]:
        return await database.read(kept, keys)

    now = datetime.fromtimestamp(clock(), UTC)
    return await sweep(store, named, timedelta(seconds=older_than_s), now)
