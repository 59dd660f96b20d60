"""Which training checkpoints stay: the last two of a run, its final one, and those of aliased revisions.

Of other revisions the adapter stays, for runs that continue it or measure their distance from it, without
what only the next step of its own run could use; other steps are dropped whole. Invariant: the rows change
first, in a transaction; only then are the files that no row names deleted. The state that a model is in stays too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from services.catalog import file_uses
from services.catalog.operation_tables import ModelRow
from services.catalog.tables import AliasRow, CheckpointRow, CommandRow, FileRow, RevisionRow

OPTIMIZER = "optimizer.safetensors"
PASSING = (OPTIMIZER, "gradients.safetensors", "old_logprobs.safetensors")
"""What a training checkpoint holds for the next step of its own run alone."""
KEPT_OF_A_RUN = 2

T = TypeVar("T")


def thin(session: Session, run_id: str) -> list[str]:
    """Let go of what need not stay. Returns the keys of files that no row names any more."""
    rows = session.scalars(
        select(CheckpointRow).where(CheckpointRow.run_id == run_id).order_by(CheckpointRow.step.desc())
    ).all()
    revisions = dict(
        session.execute(select(RevisionRow.step, RevisionRow.revision).where(RevisionRow.run_id == run_id)).all()
    )
    of_the_run = select(RevisionRow.revision).where(RevisionRow.run_id == run_id)
    exports = select(CommandRow.step).where(CommandRow.run_id == run_id, CommandRow.kind == "export")
    exporting = set(session.scalars(exports.where(CommandRow.state.in_(("open", "committed")))))
    aliased = set(session.scalars(select(AliasRow.revision).where(AliasRow.revision.in_(of_the_run))))
    freed: list[str] = []
    held = session.scalars(select(ModelRow.state_step).where(ModelRow.run_id == run_id)).first()
    for row in rows[KEPT_OF_A_RUN:]:
        if row.step == held:
            continue
        revision = revisions.get(row.step)
        if revision is None and row.step not in exporting:
            freed += [ref["key"] for ref in row.files.values()]
            session.delete(row)
        elif revision not in aliased and not row.files.keys().isdisjoint(PASSING):
            freed += [ref["key"] for name, ref in row.files.items() if name in PASSING]
            row.files = lasting(row.files)
            row.has_optimizer = False
    session.flush()
    return _unname(session, freed)


def lasting(files: Mapping[str, T]) -> dict[str, T]:
    return {name: ref for name, ref in files.items() if name not in PASSING}


def _unname(session: Session, keys: list[str]) -> list[str]:
    """Attempt files belong to one row; blobs may be shared and are left to the sweeper."""
    used = file_uses.used(session, keys)
    own = [key for key in keys if key.startswith("attempts/") and key not in used]
    if own:
        session.execute(delete(FileRow).where(FileRow.key.in_(own)))
    return own
