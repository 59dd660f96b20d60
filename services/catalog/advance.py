"""Bring one run as far as it can go now, in one transaction.

Looks at the run, plans, and carries the action out, until the run waits for a worker, for a replica, or
is over. Invariant: idempotent; called twice, or after a crash at any point, it issues nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError
from sqlalchemy.orm import Session

from services.catalog import aliases, commands, orders, plan, runs, situation
from services.catalog.readiness import Readiness
from services.catalog.register import register
from services.catalog.situation import ReadyRules
from services.catalog.tables import RunRow
from shared.bases import Base
from shared.errors import Fatal, Refused
from shared.validation import explain


@dataclass(frozen=True)
class Surroundings:
    """All that a run's next step depends on besides its rows."""

    bases: Mapping[str, Base]
    readiness: Readiness
    ready: ReadyRules
    deadline_s: float
    now: float


def advance(session: Session, run_id: str, around: Surroundings) -> None:
    """No-op for an unknown run, one that is over, and one that waits behind another."""
    run = runs.find(session, run_id)
    if run is not None and run.state == "queued" and run.policy is not None:
        runs.activate(session, run.policy, around.bases, around.now)
    if run is None or run.state not in runs.ACTIVE:
        return
    if run.base not in around.bases:
        known = ", ".join(sorted(around.bases))
        runs.end(
            session,
            run,
            "failed",
            f"base model {run.base} is not configured any more; known are {known}",
            around.bases,
            around.now,
        )
        return
    try:
        while _one_step(session, run, around):
            session.flush()
    except (Fatal, Refused) as error:
        runs.end(session, run, "failed", str(error), around.bases, around.now)
    except ValidationError as error:
        reason = f"what an older build stored is not valid any more: {'; '.join(explain(error))}"
        runs.end(session, run, "failed", reason, around.bases, around.now)


def _one_step(session: Session, run: RunRow, around: Surroundings) -> bool:
    """Carry out the next action. True if the run may go on at once."""
    seen = situation.look(session, run, around.bases, around.readiness, around.ready, around.now)
    following = plan.next_action(seen)
    runs.enter(session, run, following.state, around.now)
    _note_waiting(run, following.action, around.now)
    match following.action:
        case plan.Wait(command_id):
            commands.require_readable(session, command_id)
            return False
        case plan.AwaitReady():
            return False
        case plan.Register(step):
            register(session, run, step, around.now)
            return True
        case plan.Promote(revision, alias):
            _promote(session, run, revision, alias, around)
            return False
        case plan.Complete(outcome):
            runs.end(session, run, "completed", outcome, around.bases, around.now)
            return False
        case plan.Fail(reason):
            runs.end(session, run, "failed", reason, around.bases, around.now)
            return False
    _issue(session, run, following.action, around)
    return False


def _issue(
    session: Session,
    run: RunRow,
    action: plan.Rollout | plan.Update | plan.Export | plan.Evaluate,
    around: Surroundings,
) -> None:
    match action:
        case plan.Rollout(step=step):
            commands.issue(session, run, orders.rollout(session, run, action), step, around.now, around.deadline_s)
        case plan.Update(step=step):
            commands.issue(session, run, orders.update(session, run, action), step, around.now, around.deadline_s)
        case plan.Export(step=step):
            commands.issue(session, run, orders.export(session, run, action), step, around.now, around.deadline_s)
        case plan.Evaluate():
            body = orders.evaluation(session, run, action)
            commands.issue(session, run, body, run.steps, around.now, around.deadline_s)


def _note_waiting(run: RunRow, action: plan.Action, now: float) -> None:
    """Since when the run waits for a revision; the wait for another one begins anew."""
    wanted = action.revision if isinstance(action, plan.AwaitReady) else None
    if run.waiting_for != wanted:
        run.waiting_for, run.waiting_since = wanted, now if wanted else None


def _promote(session: Session, run: RunRow, revision: str, alias: str, around: Surroundings) -> None:
    wanted = aliases.Move(
        policy=run.policy or "",
        alias=alias,
        revision=revision,
        actor=f"run {run.run_id}",
        reason="promotion",
        expected_version=run.alias_version or 0,
    )
    aliases.move(session, wanted, run.token, around.now, run)
    run.promoted = True
    runs.end(session, run, "completed", f"promoted: {run.policy}:{alias} is {revision}", around.bases, around.now)
