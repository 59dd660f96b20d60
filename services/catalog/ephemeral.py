"""Ephemeral revisions: made to sample with for a while. They expire, are never aliased, and are hidden from lists.

Invariant: a revision is taken away only when it is ephemeral, expired, neither a path nor an alias names it, and no run
that goes on needs it; its number is not given out again.
"""

from __future__ import annotations

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from services.catalog import file_uses, notices, retention
from services.catalog.model_end import TINKER
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import OperationRow, PathRow, SamplerRow
from services.catalog.tables import AliasRow, CommandRow, RevisionRow, RunRow

__all__ = ["keep", "let_go", "revision_use", "session_ended", "sweep", "touch"]

BATCH = 200


def revision_use(revision: str) -> str:
    """As whom a revision uses its files."""
    return f"revision:{revision}"


def keep(row: RevisionRow) -> None:
    """A name points at it: it is a revision like any other."""
    row.ephemeral, row.expires_at = False, None


def let_go(session: Session, revision: str, rules: OperationRules, now: float) -> None:
    """A path that named it was taken away: it goes too, after the grace, unless something else names it or a run of
    events made it."""
    session.flush()
    method = select(RunRow.method).join(RevisionRow, RevisionRow.run_id == RunRow.run_id)
    if session.scalars(method.where(RevisionRow.revision == revision)).first() != TINKER or _named(session, revision):
        return
    going = update(RevisionRow).where(RevisionRow.revision == revision)
    session.execute(going.values(ephemeral=True, expires_at=now + rules.grace_s))


def touch(session: Session, revision: str, rules: OperationRules, now: float) -> bool:
    """It is used. False if it expired, or is gone."""
    row = session.scalars(select(RevisionRow).where(RevisionRow.revision == revision)).one_or_none()
    if row is None or (row.expires_at is not None and row.expires_at <= now):
        return False
    if row.expires_at is not None and row.expires_at < now + rules.ephemeral_ttl_s / 2:
        row.expires_at = now + rules.ephemeral_ttl_s
    return True


def session_ended(session: Session, session_id: str, rules: OperationRules, now: float) -> None:
    """What its samplers had to themselves lives for the grace."""
    mine = select(SamplerRow.revision).where(SamplerRow.session_id == session_id)
    until = now + rules.grace_s
    ending = update(RevisionRow).where(RevisionRow.revision.in_(mine), RevisionRow.ephemeral.is_(True))
    session.execute(ending.where(RevisionRow.expires_at > until).values(expires_at=until))


def sweep(session: Session, now: float) -> list[str]:
    """Take away what has expired, and the training checkpoints that stayed for it. Returns the revisions; their blobs
    are left to the sweeper of files."""
    query = select(RevisionRow).where(RevisionRow.ephemeral.is_(True), RevisionRow.expires_at <= now)
    rows = session.scalars(query.limit(BATCH)).all()
    needed = _sampled(session) | _of_runs(session) if rows else set()
    gone, run_ids = [], set()
    for row in rows:
        if row.revision in needed or _named(session, row.revision):
            continue
        file_uses.drop(session, revision_use(row.revision))
        # Its export may be asked for again, under the same name.
        session.execute(delete(CommandRow).where(CommandRow.command_id == row.export_command))
        session.delete(row)
        gone.append(row.revision)
        run_ids.add(row.run_id)
    session.flush()
    for run_id in sorted(run_ids):  # a model that is unloaded says nothing more that would have it thinned
        notices.freed(session, retention.thin(session, run_id))
    return gone


def _named(session: Session, revision: str) -> bool:
    path = session.scalars(select(PathRow.seq).where(PathRow.revision == revision).limit(1)).first()
    # An alias points at a revision of its own policy, by which aliases are found.
    of_its_policy = select(AliasRow.alias).where(AliasRow.policy == revision.partition("@")[0])
    alias = session.scalars(of_its_policy.where(AliasRow.revision == revision).limit(1)).first()
    return path is not None or alias is not None


def _sampled(session: Session) -> set[str | None]:
    """Those with which a sample is open."""
    query = select(OperationRow.details["revision"].as_string()).distinct()
    query = query.where(OperationRow.kind == "sample", OperationRow.state.in_(("queued", "running")))
    return set(session.scalars(query))


def _of_runs(session: Session) -> set[str | None]:
    """Those that a run continues or scores which is not over. A model needs its files alone, and uses them itself."""
    scored = RunRow.request["revision"].as_string()
    query = select(RunRow.parent, scored).where(RunRow.state.in_(("queued", "running", "evaluating", "promoting")))
    return {name for row in session.execute(query.where(RunRow.method != TINKER)) for name in row}
