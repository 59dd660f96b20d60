"""Desired residency: what the serving replicas of each base model should hold, read from the database.

Out: one `Desired` per base. Invariant: it follows from committed rows alone, so that the bucket can be
rebuilt at any time. Most urgent first: what an active run samples with, then what an alias move waits
for, then what aliases point at.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import orders, runs
from services.catalog.tables import AliasRow, PrewarmRow, RevisionRow, RunRow
from shared.residency import Desired, DesiredRevision

RUNNING, MOVING, ALIASED = 0, 1, 2


def desired(session: Session, base: str, now: float) -> Desired:
    urgency: dict[str, int] = {}
    aliased = _aliased(session, base)
    for revision in aliased:
        urgency[revision] = ALIASED
    for revision in session.scalars(select(PrewarmRow.revision).where(PrewarmRow.until > now)):
        urgency[revision] = MOVING
    active = select(RunRow).where(RunRow.base == base, RunRow.state.in_(runs.ACTIVE)).order_by(RunRow.seq)
    for run in session.scalars(active):
        for revision in needed(session, run):
            urgency[revision] = RUNNING
    query = select(RevisionRow.revision, RevisionRow.adapter_sha256).where(
        RevisionRow.base == base, RevisionRow.revision.in_(list(urgency))
    )
    entries = [
        DesiredRevision(
            revision=revision, adapter_sha256=digest, priority=urgency[revision], pinned=revision in aliased
        )
        for revision, digest in session.execute(query)
    ]
    return Desired(base=base, entries=tuple(sorted(entries, key=lambda e: (e.priority, e.revision))))


def needed(session: Session, run: RunRow) -> set[str]:
    """The revisions that an active run samples with now: its current one, and while it is scored also the
    parent that its gate compares with."""
    last = runs.last_revision(session, run.run_id)
    samples = run.method != "sft"
    if last is None:
        return {run.parent} if samples and run.parent else set()
    found = {last.revision} if samples or last.step == run.steps else set()
    evaluation = orders.request_of(run).evaluation
    compares = evaluation is not None and evaluation.gate.no_worse_than == "parent"
    if last.step == run.steps and compares and run.parent:
        found.add(run.parent)
    return found


def _aliased(session: Session, base: str) -> set[str]:
    query = select(AliasRow.revision).join(RevisionRow, RevisionRow.revision == AliasRow.revision)
    return set(session.scalars(query.where(RevisionRow.base == base)))
