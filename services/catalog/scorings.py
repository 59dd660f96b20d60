"""Runs that only score a revision: one evaluation, beside whatever trains the policy.

In: a reference, a task that was read already. Out: a run whose end names the score. Invariants: such a run is no
policy's active one and makes nothing; what is scored already under the same key is not scored again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mint_schemas.cloudevents import run_id_for
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import datarefs, evaluations, orders, plan, runs, situation, tracing
from services.catalog.orders import EVALUATION
from services.catalog.readiness import Readiness
from services.catalog.resolve import resolve
from services.catalog.runs import Scoring
from services.catalog.tables import CommandRow, RevisionRow, RunRow
from shared.bases import Base
from shared.catalog.api import ResolvedRevision, StartEvaluation
from shared.errors import Fatal, Refused

__all__ = ["SOURCE", "begin", "find", "next_action", "subject"]

SOURCE = "mint/evaluations"


def find(session: Session, request: StartEvaluation) -> RunRow | None:
    """The run of the same key. Raises Refused (409) where it was asked for something else."""
    run = runs.find(session, run_id_for(SOURCE, request.key))
    if run is None or run.request["asked"] == _asked(request):
        return run
    message = f"the key {request.key!r} was used for evaluation {run.run_id} with another body; use a new key"
    raise Refused(message, code="idempotency_conflict", status=409)


def subject(session: Session, reference: str, bases: Mapping[str, Base]) -> ResolvedRevision:
    """The revision that the reference means now. Raises Refused: 404, and 400 for what cannot be scored."""
    found = resolve(session, reference, bases)
    if found.revision is None:
        raise Refused(f"{reference} is a base model; an evaluation by itself scores a policy's revision")
    if found.base not in bases:
        raise Refused(f"{found.revision} is on {found.base}, which is not configured here")
    row = session.scalars(select(RevisionRow).where(RevisionRow.revision == found.revision)).one()
    if row.ephemeral:
        raise Refused(f"{found.revision} is ephemeral and may be gone before it is scored; save it under a name")
    return found


def begin(
    session: Session,
    request: StartEvaluation,
    found: ResolvedRevision,
    scoring: Scoring,
    bases: Mapping[str, Base],
    now: float,
) -> RunRow:
    known = find(session, request)
    if known is not None:
        return known
    policy = found.policy or ""
    tenant = policy.split("/", 1)[0]
    run = RunRow(
        run_id=run_id_for(SOURCE, request.key),
        policy=policy,
        tenant=tenant,
        base=found.base,
        token=bases[found.base].token,
        state="queued",
        method=EVALUATION,
        steps=0,
        outcome="",
        request=_request(request, found),
        request_source=SOURCE,
        request_id=request.key,
        traceparent=tracing.for_run(None),
        created_at=now,
        started_at=now,
        task_sha256=scoring.task_sha256,
        scorer=scoring.scorer,
        promoted=False,
    )
    session.add(run)
    datarefs.keep_files(session, tenant, datarefs.of_task(request.evaluation.task))
    session.flush()
    runs.enter(session, run, "evaluating", now)
    return run


def _request(request: StartEvaluation, found: ResolvedRevision) -> dict[str, Any]:
    """What the run shows as its request: no TrainRequested, and read by nobody as one."""
    evaluation = request.evaluation.model_dump(mode="json", exclude_unset=True)
    shown = {"kind": EVALUATION, "revision": found.revision, "evaluation": evaluation, "actor": request.actor}
    return {**shown, "asked": _asked(request)}


def _asked(request: StartEvaluation) -> dict[str, Any]:
    return request.model_dump(mode="json", include={"reference", "evaluation"})


@dataclass(frozen=True)
class _Readied:
    ready: Mapping[str, int]
    failed: Mapping[str, str]
    waiting_for: str | None
    waited_s: float
    ready_timeout_s: float


def next_action(
    session: Session,
    run: RunRow,
    bases: Mapping[str, Base],
    readiness: Readiness,
    rules: situation.ReadyRules,
    now: float,
) -> plan.Next:
    revision = str(run.request["revision"])
    evaluation, scoring = orders.evaluation_of(run), situation.scoring_of(run)
    if evaluation is None or scoring is None:
        raise Fatal(f"run {run.run_id} does not say what it is scored by")
    key = evaluations.key_for(bases[run.base or ""].sha256, revision, scoring, evaluation)
    score = evaluations.find_score(session, key)
    if score is not None:
        return plan.Next("evaluating", plan.Complete(f"{revision} scores {score:.4g}", revision))
    if _is_working(session, run):
        return plan.Next("evaluating", plan.Wait())
    waited_s = now - run.waiting_since if run.waiting_since is not None else 0.0
    readied = _Readied(readiness.counts(), readiness.failed, run.waiting_for, waited_s, rules.timeout_s)
    return plan.Next("evaluating", plan.once_ready(readied, revision) or plan.Evaluate("last", revision))


def _is_working(session: Session, run: RunRow) -> bool:
    query = select(CommandRow.command_id).where(CommandRow.run_id == run.run_id, CommandRow.state == "open")
    return session.scalars(query.limit(1)).first() is not None
