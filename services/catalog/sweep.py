"""Which stored files a row names, for the sweeper: all others of a day's age are removed.

Invariant: nothing that is named is removed, and nothing that may yet be named: files of a run that is not
over, and, while any run may export, blobs, since an export may be about to name one that is there already.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import runs
from services.catalog.clock import Clock
from services.catalog.database import Database
from services.catalog.model_end import TINKER
from services.catalog.tables import CommandRow, FileRow, RunRow
from shared.store.keys import ATTEMPTS, BLOBS
from shared.store.port import ObjectStore
from shared.store.sweep import sweep


def kept(session: Session, keys: list[str]) -> set[str]:
    """The keys that stay."""
    named = set(session.scalars(select(FileRow.key).where(FileRow.key.in_(keys))))
    rows = session.execute(select(RunRow.run_id, RunRow.method).where(RunRow.state.not_in(runs.ENDED))).all()
    unfinished = {run_id for run_id, _ in rows}
    exporting = any(method != TINKER for _, method in rows) or _export_is_open(session)
    return {key for key in keys if key in named or _pending(key, unfinished, exporting)}


def _pending(key: str, unfinished: set[str], exporting: bool) -> bool:
    if key.startswith(ATTEMPTS):
        return key.removeprefix(ATTEMPTS).split("/", 1)[0] in unfinished
    return key.startswith(BLOBS) and exporting


def _export_is_open(session: Session) -> bool:
    """Of models too, which are open for days between their saves."""
    query = select(CommandRow.command_id).where(CommandRow.kind == "export", CommandRow.state == "open")
    return session.scalars(query.limit(1)).first() is not None


async def sweep_once(database: Database, store: ObjectStore, older_than_s: float, clock: Clock) -> list[str]:
    """Returns the keys that were removed."""

    async def named(keys: list[str]) -> set[str]:
        return await database.read(kept, keys)

    now = datetime.fromtimestamp(clock(), UTC)
    return await sweep(store, named, timedelta(seconds=older_than_s), now)
