"""Bring one run as far as it can go now, in one transaction.

Looks at the run, plans, and carries the action out, again and again, until the run waits for workers, for
a replica, or is over. What a client commands itself is moved by its own operations; only the saves that wait for an
export are settled here. Invariant: idempotent; called twice, or after a crash at any point, it issues nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mint_schemas.commands import Command
from pydantic import ValidationError
from sqlalchemy.orm import Session

from services.catalog import aliases, commands, orders, plan, runs, sampler_saves, scorings, situation
from services.catalog.actions import Order
from services.catalog.model_end import TINKER
from services.catalog.operation_rules import OperationRules
from services.catalog.orders import EVALUATION
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
    operations: OperationRules | None = None

    @property
    def rules(self) -> OperationRules:
        return self.operations or OperationRules(self.bases, deadline_s=self.deadline_s)


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
    if run.method == TINKER:
        sampler_saves.settle(session, run, around.rules, around.now)
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
    following, done = _next(session, run, around)
    runs.enter(session, run, following.state, around.now)
    match following.action:
        case plan.Wait() | plan.AwaitReady():
            commands.require_readable(session, run.run_id)
            _note_waiting(run, following.action, around.now)
            return False
        case plan.DropRollouts():
            commands.close_rollouts(session, run.run_id)
            return True
        case plan.Register(step):
            register(session, run, step, around.now)
            return True
        case plan.Promote():
            _promote(session, run, following.action, around)
            return False
        case plan.Complete(outcome, revision):
            runs.end(session, run, "completed", outcome, around.bases, around.now, revision)
            return False
        case plan.Fail(reason):
            runs.end(session, run, "failed", reason, around.bases, around.now)
            return False
    _issue(session, run, following.action, done, around)
    return True


def _next(session: Session, run: RunRow, around: Surroundings) -> tuple[plan.Next, int]:
    """And how many optimizer steps are done."""
    if run.method == EVALUATION:
        return scorings.next_action(session, run, around.bases, around.readiness, around.ready, around.now), 0
    seen = situation.look(session, run, around.bases, around.readiness, around.ready, around.now)
    return plan.next_action(seen), seen.done


def _issue(session: Session, run: RunRow, action: Order, done: int, around: Surroundings) -> None:
    body: Command
    match action:
        case plan.Rollout(step=step):
            body = orders.rollout(session, run, action)
        case plan.Update(step=step):
            body = orders.update(session, run, action)
        case plan.Export(step=step):
            body = orders.export(session, run, action)
        case plan.Evaluate():
            body, step = orders.evaluation(session, run, action), done
    commands.issue(session, run, body, step, around.now, around.deadline_s)


def _note_waiting(run: RunRow, action: plan.Wait | plan.AwaitReady, now: float) -> None:
    """Since when the run waits for a revision; the wait for another one begins anew. What is issued
    meanwhile ends no wait."""
    wanted = action.revision if isinstance(action, plan.AwaitReady) else None
    if run.waiting_for != wanted:
        run.waiting_for, run.waiting_since = wanted, now if wanted else None


def _promote(session: Session, run: RunRow, action: plan.Promote, around: Surroundings) -> None:
    wanted = aliases.Move(
        policy=run.policy or "",
        alias=action.alias,
        revision=action.revision,
        actor=f"run {run.run_id}",
        reason="promotion",
        expected_version=run.alias_version or 0,
    )
    aliases.move(session, wanted, run.token, around.now, run)
    run.promoted = True
    outcome = f"promoted: {run.policy}:{action.alias} is {action.revision}{action.remark}"
    runs.end(session, run, "completed", outcome, around.bases, around.now, action.revision)
