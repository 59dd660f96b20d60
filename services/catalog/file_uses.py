"""Who needs a stored file: paths, revisions, operations, and models that start from one.

Invariant: a file stays named while somebody uses it or a training checkpoint names it; with its last use it is let go
in the same transaction, and removed behind it.
"""

from __future__ import annotations

from collections.abc import Iterable

from mint_schemas.common import FileRef
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from services.catalog import notices
from services.catalog.operation_tables import FileUseRow
from services.catalog.tables import CheckpointRow, FileRow
from shared.store.keys import ATTEMPTS

__all__ = ["drop", "name", "use", "used"]


def name(session: Session, refs: Iterable[FileRef], owner: str) -> None:
    """Make the files exist for the system."""
    for ref in {ref.key: ref for ref in refs}.values():
        if session.get(FileRow, ref.key) is None:
            session.add(FileRow(key=ref.key, sha256=ref.sha256, size=ref.size, owner=owner))
    session.flush()


def use(session: Session, holder: str, refs: Iterable[FileRef]) -> None:
    """Name them, and keep them until `drop`."""
    listed = list(refs)
    name(session, listed, holder)
    for key in {ref.key for ref in listed}:
        if session.get(FileUseRow, (key, holder)) is None:
            session.add(FileUseRow(key=key, holder=holder))
    session.flush()


def used(session: Session, keys: Iterable[str]) -> set[str]:
    """Those of them that somebody uses."""
    return set(session.scalars(select(FileUseRow.key).where(FileUseRow.key.in_(list(keys)))))


def drop(session: Session, holder: str) -> None:
    """`holder` needs nothing any more."""
    session.flush()
    keys = set(session.scalars(select(FileUseRow.key).where(FileUseRow.holder == holder)))
    if not keys:
        return
    # Of two catalogs that drop the last two uses of a file at once, one sees that the other's is gone.
    session.scalars(select(FileRow.key).where(FileRow.key.in_(keys)).order_by(FileRow.key).with_for_update()).all()
    session.execute(delete(FileUseRow).where(FileUseRow.holder == holder))
    free = keys - used(session, keys)
    free -= _of_checkpoints(session, free)
    session.execute(delete(FileRow).where(FileRow.key.in_(free)))
    # Of blobs somebody may be putting the same bytes just now; the sweeper goes by their age.
    notices.freed(session, sorted(key for key in free if key.startswith(ATTEMPTS)))


def _of_checkpoints(session: Session, keys: set[str]) -> set[str]:
    """Those of them that a training checkpoint names."""
    run_ids = {key.split("/")[1] for key in keys if key.startswith(ATTEMPTS)}
    query = select(CheckpointRow.files).where(CheckpointRow.run_id.in_(run_ids))
    return {ref["key"] for files in session.scalars(query) for ref in files.values()} if run_ids else set()
