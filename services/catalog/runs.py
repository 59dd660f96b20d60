"""The life of a run: arrived → queued → running → evaluating → promoting → completed | failed | cancelled.

Invariant: a policy has one active run; later ones queue in order of arrival; an end state is final, and
reaching it closes the run's commands and lets the next run of the policy begin, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mint_schemas.events import RunEnded
from mint_schemas.training import TrainRequested
from pydantic import ValidationError
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from services.catalog import datarefs, emit, model_end
from services.catalog.lineage import trace_lineage
from services.catalog.tables import CommandRow, EvaluationRow, PolicyRow, RevisionRow, RunRow
from shared.bases import Base
from shared.errors import Refused
from shared.validation import explain

ACTIVE = ("running", "evaluating", "promoting")
ENDED = ("completed", "failed", "cancelled")
MAX_OUTCOME = 4000


@dataclass(frozen=True)
class Arrival:
    """A request as it came in. `token` is the base token to answer under."""

    run_id: str
    source: str
    id: str
    token: str
    traceparent: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Scoring:
    """What the run's evaluation is scored by, known once the task's data was read."""

    task_sha256: str
    scorer: str


def find(session: Session, run_id: str) -> RunRow | None:
    return session.scalars(select(RunRow).where(RunRow.run_id == run_id)).one_or_none()


def accept(
    session: Session,
    arrival: Arrival,
    request: TrainRequested,
    scoring: Scoring | None,
    bases: Mapping[str, Base],
    now: float,
) -> RunRow:
    """The run of a valid request; the one that exists already when it came before."""
    existing = find(session, arrival.run_id)
    if existing is not None:
        return existing
    if session.get(PolicyRow, request.policy) is None:
        tenant = request.policy.split("/", 1)[0]
        session.add(PolicyRow(policy=request.policy, tenant=tenant, base=request.base, created_at=now, last_number=0))
    run = _new_run(arrival, "queued", now)
    run.policy, run.tenant = request.policy, request.policy.split("/", 1)[0]
    run.base, run.method, run.steps = request.base, request.method.kind, request.method.steps
    run.token = bases[request.base].token
    if scoring is not None:
        run.task_sha256, run.scorer = scoring.task_sha256, scoring.scorer
    session.add(run)
    datarefs.keep(session, request)
    session.flush()
    emit.state_changed(session, run, None, now)
    activate(session, request.policy, bases, now)
    return run


def refuse(session: Session, arrival: Arrival, reason: str, now: float) -> RunRow:
    """The answer to a request that cannot run: a run that failed before it began."""
    existing = find(session, arrival.run_id)
    if existing is not None:
        return existing
    run = _new_run(arrival, "queued", now)
    method = arrival.body.get("method")
    run.method = str(method["kind"])[:40] if isinstance(method, dict) and "kind" in method else None
    session.add(run)
    session.flush()
    _close(session, run, "failed", reason, now)
    return run


def _new_run(arrival: Arrival, state: str, now: float) -> RunRow:
    return RunRow(
        run_id=arrival.run_id,
        state=state,
        token=arrival.token,
        request=arrival.body,
        request_source=arrival.source,
        request_id=arrival.id,
        traceparent=arrival.traceparent,
        created_at=now,
        steps=0,
        outcome="",
        promoted=False,
    )


def activate(session: Session, policy: str, bases: Mapping[str, Base], now: float) -> None:
    """Let the policy's oldest queued run begin, unless one is active."""
    while session.scalars(select(RunRow).where(RunRow.active_policy == policy)).first() is None:
        oldest = select(RunRow).where(RunRow.policy == policy, RunRow.state == "queued").order_by(RunRow.seq).limit(1)
        run = session.scalars(oldest).first()
        if run is None:
            return
        _begin(session, run, bases, now)


def _begin(session: Session, run: RunRow, bases: Mapping[str, Base], now: float) -> None:
    try:
        request = TrainRequested.model_validate(run.request)
        base = bases.get(request.base)
        if base is None:
            raise Refused(f"base model {request.base} is not configured any more; known are {', '.join(sorted(bases))}")
        lineage = trace_lineage(session, request, base)
    except Refused as refusal:
        _close(session, run, "failed", str(refusal), now)
        return
    except ValidationError as error:
        _close(session, run, "failed", f"the request is not valid any more: {'; '.join(explain(error))}", now)
        return
    run.parent, run.alias_version = lineage.parent, lineage.alias_version
    run.lora = lineage.lora.model_dump(mode="json")
    run.active_policy, run.started_at = run.policy, now
    enter(session, run, "running", now)


def enter(session: Session, run: RunRow, state: Literal["running", "evaluating", "promoting"], now: float) -> None:
    if run.state == state:
        return
    previous, run.state = run.state, state
    session.flush()
    emit.state_changed(session, run, previous, now)


def end(
    session: Session,
    run: RunRow,
    state: Literal["completed", "failed", "cancelled"],
    outcome: str,
    bases: Mapping[str, Base],
    now: float,
    picked: str | None = None,
) -> None:
    """No-op for a run that is over. `picked`: the revision that the run stands for, where it is not simply
    the last one."""
    if run.state in ENDED:
        return
    run.picked = picked
    _close(session, run, state, outcome, now)
    if run.policy is not None:
        activate(session, run.policy, bases, now)


def _close(session: Session, run: RunRow, state: str, outcome: str, now: float) -> None:
    run.state, run.ended_at, run.active_policy = state, now, None
    run.waiting_for, run.waiting_since = None, None
    run.outcome = outcome if len(outcome) <= MAX_OUTCOME else f"{outcome[: MAX_OUTCOME - 1]}…"
    session.execute(
        update(CommandRow).where(CommandRow.run_id == run.run_id, CommandRow.state == "open").values(state="closed")
    )
    revision = result_of(session, run)
    body = RunEnded(
        run_id=run.run_id,
        state=state,
        policy=run.policy,
        base=run.base,
        outcome=run.outcome,
        request_source=run.request_source,
        request_id=run.request_id,
        revision=revision,
        promoted=run.promoted,
        score=_score(session, revision) if revision else None,
    )
    session.flush()
    model_end.close(session, run.run_id, run.outcome, now)
    emit.fact(session, run, f"mint.v1.run.{state}", f"{run.run_id}:{state}", body, now)


def last_revision(session: Session, run_id: str) -> RevisionRow | None:
    """Of those that stay."""
    query = select(RevisionRow).where(RevisionRow.run_id == run_id, RevisionRow.ephemeral.is_(False))
    return session.scalars(query.order_by(RevisionRow.step.desc()).limit(1)).first()


def result_of(session: Session, run: RunRow) -> str | None:
    """The revision that the run stands for: the picked one, else its last."""
    if run.picked is not None:
        return run.picked
    last = last_revision(session, run.run_id)
    return last.revision if last else None


def _score(session: Session, revision: str) -> float | None:
    query = select(EvaluationRow.score).where(EvaluationRow.revision == revision)
    return session.scalars(query.order_by(EvaluationRow.seq.desc()).limit(1)).first()
