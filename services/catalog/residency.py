"""Desired residency: what the serving replicas of each base model should hold, read from the database.

Out: one `Desired` per base. Invariant: it follows from committed rows alone, so that the bucket can be
rebuilt at any time, and its length does not grow with the catalog. Most urgent first: what an active run
samples with, then what an alias move waits for, then what aliases of pinned policies point at; last, and
only while there is room, what aliases were moved to lately. What clients sample with of a model
that they command themselves is brought in by their requests.
"""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from services.catalog import orders, runs
from services.catalog.goal import Goal, goal_of, record_at, sampled_after, scores_step
from services.catalog.model_end import TINKER
from services.catalog.pins import pinned_revisions
from services.catalog.tables import AliasRow, CommandRow, PrewarmRow, RevisionRow, RunRow
from shared.residency import Desired, DesiredRevision

RUNNING, MOVING, PINNED, RECENT = 0, 1, 2, 3
RECENT_MOVES = 128


def desired(session: Session, base: str, now: float) -> Desired:
    pinned = pinned_revisions(session, base)
    urgency = dict.fromkeys(_moved_to_lately(session, base), RECENT) | dict.fromkeys(pinned, PINNED)
    for revision in session.scalars(select(PrewarmRow.revision).where(PrewarmRow.until > now)):
        urgency[revision] = MOVING
    active = select(RunRow).where(RunRow.base == base, RunRow.state.in_(runs.ACTIVE)).order_by(RunRow.seq)
    for run in session.scalars(active.where(RunRow.method != TINKER)):
        for revision in needed(session, run):
            urgency[revision] = RUNNING
    query = select(RevisionRow.revision, RevisionRow.adapter_sha256).where(
        RevisionRow.base == base, RevisionRow.revision.in_(list(urgency))
    )
    entries = [
        DesiredRevision(
            revision=revision,
            adapter_sha256=digest,
            priority=urgency[revision],
            pinned=revision in pinned,
            keep=urgency[revision] != RECENT,
        )
        for revision, digest in session.execute(query)
    ]
    return Desired(base=base, entries=tuple(sorted(entries, key=lambda e: (e.priority, e.revision))))


def needed(session: Session, run: RunRow) -> set[str]:
    """The revisions that an active run samples with now or next: those that its open commands name, the one
    that it waits for, what its next rollouts need, its last one when that is scored, and with the final one
    also the parent that the gate compares with."""
    found = _sampling_now(session, run)
    if run.waiting_for is not None:
        found.add(run.waiting_for)
    if run.method == orders.EVALUATION:
        return found
    goal = goal_of(orders.request_of(run))
    last = runs.last_revision(session, run.run_id)
    if last is None:
        return found | ({run.parent} if goal.samples and run.parent else set())
    final = last.step == run.steps or run.state in ("evaluating", "promoting")
    if final or goal.samples or scores_step(goal, last.step):
        found.add(last.revision)
    if final and goal.no_worse_than == "parent" and run.parent:
        found.add(run.parent)
    return found if final else found | _sampling_next(session, run, goal)


def _sampling_now(session: Session, run: RunRow) -> set[str]:
    query = select(CommandRow.body).where(CommandRow.run_id == run.run_id, CommandRow.state == "open")
    bodies = session.scalars(query.where(CommandRow.kind.in_(("rollout", "evaluation"))))
    return {body["revision"] for body in bodies if body.get("revision")}


def _sampling_next(session: Session, run: RunRow, goal: Goal) -> set[str]:
    """What the records that are not asked for yet are sampled with, where they may lag behind the last one."""
    if not goal.staleness:
        return set()
    asked = select(func.max(CommandRow.step)).where(CommandRow.run_id == run.run_id, CommandRow.kind == "rollout")
    since = sampled_after(goal, record_at(goal, session.scalar(asked) or 1) + 1)
    query = select(RevisionRow.revision).where(RevisionRow.run_id == run.run_id, RevisionRow.step >= max(1, since))
    found = set(session.scalars(query))
    return found | {run.parent} if since == 0 and run.parent else found


def _moved_to_lately(session: Session, base: str) -> list[str]:
    """What the aliases that were moved last point at."""
    query = select(AliasRow.revision).where(AliasRow.base == base).order_by(AliasRow.moved.desc()).limit(RECENT_MOVES)
    return list(session.scalars(query))
