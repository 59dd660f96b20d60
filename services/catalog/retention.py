"""Which training checkpoints stay: the last two of a run, its final one, and those of aliased revisions; of a model
that is unloaded the latter alone.

Of other revisions the adapter stays, for runs that continue it or measure their distance from it, without
what only the next step of its own run could use; other steps are dropped whole. Invariant: the rows change
first, in a transaction; only then are the files that no row names deleted. The state that a model is in stays too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from sqlalchemy import delete, or_, select
from sqlalchemy.orm import Session

from services.catalog import commands, file_uses
from services.catalog.operation_tables import ModelRow
from services.catalog.tables import AliasRow, CheckpointRow, CommandRow, FileRow, RevisionRow

OPTIMIZER = "optimizer.safetensors"
PASSING = (OPTIMIZER, "gradients.safetensors", "old_logprobs.safetensors")
"""What a training checkpoint holds for the next step of its own run alone."""
KEPT_OF_A_RUN = 2

T = TypeVar("T")


def thin(session: Session, run_id: str) -> list[str]:
    """Let go of what need not stay. Returns the keys of files that no row names any more."""
    rows = _undecided(session, run_id)
    steps = [row.step for row in rows]
    made = select(RevisionRow.step, RevisionRow.revision).where(RevisionRow.run_id == run_id)
    revisions = dict(session.execute(made.where(RevisionRow.step.in_(steps))).all())
    named = [commands.command_id(run_id, "export", step) for step in steps]
    exports = select(CommandRow.step).where(CommandRow.command_id.in_(named))
    exporting = set(session.scalars(exports.where(CommandRow.state.in_(("open", "committed")))))
    # By their policy, which has an index.
    aliases = select(AliasRow.revision).where(AliasRow.policy.in_({row.policy for row in rows}))
    aliased = set(session.scalars(aliases.where(AliasRow.revision.in_(revisions.values()))))
    freed: list[str] = []
    for row in rows:
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


def _undecided(session: Session, run_id: str) -> list[CheckpointRow]:
    """Those that do not stay whole anyway and may hold more than stays, so that after many steps this is no longer a
    look at all of them."""
    revision = select(RevisionRow.seq).where(RevisionRow.run_id == run_id, RevisionRow.step == CheckpointRow.step)
    query = select(CheckpointRow).where(CheckpointRow.run_id == run_id)
    query = query.where(CheckpointRow.step.not_in(_whole(session, run_id)))
    query = query.where(or_(CheckpointRow.has_optimizer.is_(True), ~revision.exists()))
    return list(session.scalars(query.order_by(CheckpointRow.step.desc())))


def _whole(session: Session, run_id: str) -> list[int]:
    """Steps that stay as they are, whatever names them. Of a model that is unloaded none: nothing goes on from its
    state, and what its client wanted to keep has a path."""
    model = session.scalars(select(ModelRow).where(ModelRow.run_id == run_id)).one_or_none()
    if model is not None and model.state == "unloaded":
        return []
    of_run = select(CheckpointRow.step).where(CheckpointRow.run_id == run_id)
    last = list(session.scalars(of_run.order_by(CheckpointRow.step.desc()).limit(KEPT_OF_A_RUN)))
    return last if model is None else [*last, model.state_step]


def lasting(files: Mapping[str, T]) -> dict[str, T]:
    return {name: ref for name, ref in files.items() if name not in PASSING}


def _unname(session: Session, keys: list[str]) -> list[str]:
    """Attempt files belong to one row; blobs may be shared and are left to the sweeper."""
    used = file_uses.used(session, keys)
    own = [key for key in keys if key.startswith("attempts/") and key not in used]
    if own:
        session.execute(delete(FileRow).where(FileRow.key.in_(own)))
    return own
