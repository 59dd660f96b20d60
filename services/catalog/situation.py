"""The view of a run that its plan is made from: committed rows and the readiness of one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mint_schemas.training import TrainRequested
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from services.catalog import aliases, commands, evaluations, orders
from services.catalog.goal import Goal, first_step, goal_of, record_at, sampled_after, use_of
from services.catalog.plan import Situation
from services.catalog.readiness import Readiness
from services.catalog.runs import Scoring
from services.catalog.tables import AliasRow, CheckpointRow, CommandRow, EvaluationRow, RevisionRow, RunRow
from services.catalog.verdict import skip_limit
from shared.bases import Base


@dataclass(frozen=True)
class ReadyRules:
    timeout_s: float = 900.0
    min_ready: int = 1


def look(
    session: Session, run: RunRow, bases: Mapping[str, Base], readiness: Readiness, rules: ReadyRules, now: float
) -> Situation:
    request = orders.request_of(run)
    goal = goal_of(request)
    done = session.scalar(select(func.max(CheckpointRow.step)).where(CheckpointRow.run_id == run.run_id)) or 0
    scores, scored = _scores(session, run, request, bases) if needs_scores(goal, done) else ({}, {})
    alias = session.get(AliasRow, (run.policy, request.promote_to)) if request.promote_to else None
    return Situation(
        goal=goal,
        parent=run.parent,
        working=_working(session, run),
        done=done,
        skipped=_skipped(session, run, skip_limit(goal)),
        tokens=_tokens(session, run) if goal.max_tokens is not None else 0,
        records=_records(session, run, goal, done),
        exported=_committed(session, run, "export", done),
        revisions={**scored, **_revisions(session, run, goal, done)},
        scores=scores,
        reference_score=_reference_score(session, run, request, bases),
        ready=readiness.counts(),
        failed=readiness.failed,
        waiting_for=run.waiting_for,
        waited_s=now - run.waiting_since if run.waiting_since is not None else 0.0,
        ready_timeout_s=rules.timeout_s,
        min_ready=rules.min_ready,
        alias_expected=run.alias_version or 0,
        alias_version=alias.version if alias else 0,
        alias_moved_by=aliases.last_mover(session, run.policy or "", request.promote_to or ""),
    )


def _of(run: RunRow, *kinds: str) -> ColumnElement[bool]:
    return (CommandRow.run_id == run.run_id) & CommandRow.kind.in_(kinds)


def _working(session: Session, run: RunRow) -> Any:
    """The kind of the open command that is no rollout; the plan never has two of them open."""
    query = select(CommandRow.kind).where(_of(run, "update", "export", "evaluation"), CommandRow.state == "open")
    return session.scalars(query.limit(1)).first()


def _committed(session: Session, run: RunRow, kind: str, step: int) -> bool:
    row = session.get(CommandRow, commands.command_id(run.run_id, kind, step))
    return row is not None and row.state == "committed"


def _records(session: Session, run: RunRow, goal: Goal, done: int) -> dict[int, Any]:
    """Record → the state of its rollout, from the record of the next step on."""
    if not goal.samples:
        return {}
    since = first_step(goal, use_of(goal, done + 1).record)
    query = select(CommandRow.step, CommandRow.state).where(_of(run, "rollout"), CommandRow.step >= since)
    rows = session.execute(query.where(CommandRow.state.in_(("open", "committed"))))
    return {record_at(goal, step): state for step, state in rows}


def _revisions(session: Session, run: RunRow, goal: Goal, done: int) -> dict[int, str]:
    """By step: that of `done`, and those that the rollouts of the next records are sampled with."""
    since = min(done, sampled_after(goal, use_of(goal, done + 1).record))
    query = select(RevisionRow.step, RevisionRow.revision)
    rows = session.execute(query.where(RevisionRow.run_id == run.run_id, RevisionRow.step >= since))
    return dict(rows.all())


def _skipped(session: Session, run: RunRow, most: int) -> int:
    """How many of the latest updates in a row made no optimizer step, counted up to `most`."""
    query = select(CommandRow.result).where(_of(run, "update"), CommandRow.state == "committed")
    results = session.scalars(query.order_by(CommandRow.step.desc()).limit(most)).all()
    trained = (place for place, result in enumerate(results) if not (result or {}).get("skipped"))
    return next(trained, len(results))


def _tokens(session: Session, run: RunRow) -> int:
    """Sampled and trained on so far, by the committed results."""
    sampled = select(func.sum(CommandRow.result["tokens"].as_integer())).where(_of(run, "rollout"))
    trained = select(func.sum(CommandRow.result[("metrics", "tokens")].as_float())).where(_of(run, "update"))
    counted = (session.scalar(query.where(CommandRow.state == "committed")) for query in (sampled, trained))
    return round(sum(tokens or 0 for tokens in counted))


def needs_scores(goal: Goal, done: int) -> bool:
    """Whether scores decide anything now: on the way, where steps are scored, and once the training is over,
    which a token budget may bring about at any step."""
    return done == goal.steps or goal.eval_every is not None or goal.max_tokens is not None


def _scores(
    session: Session, run: RunRow, request: TrainRequested, bases: Mapping[str, Base]
) -> tuple[dict[int, float], dict[int, str]]:
    """(scores, revisions) by step: the run's own revisions, as its evaluation scores them."""
    evaluation, scoring = request.evaluation, scoring_of(run)
    if evaluation is None or scoring is None:
        return {}, {}
    columns = select(RevisionRow.step, RevisionRow.revision, EvaluationRow.score_key, EvaluationRow.score)
    query = columns.join(EvaluationRow, EvaluationRow.revision == RevisionRow.revision)
    scores, revisions = {}, {}
    for step, revision, key, score in session.execute(query.where(RevisionRow.run_id == run.run_id)):
        if key == evaluations.key_for(bases[request.base].sha256, revision, scoring, evaluation):
            scores[step], revisions[step] = score, revision
    return scores, revisions


def scoring_of(run: RunRow) -> Scoring | None:
    if run.task_sha256 is None or run.scorer is None:
        return None
    return Scoring(run.task_sha256, run.scorer)


def _reference_score(session: Session, run: RunRow, request: TrainRequested, bases: Mapping[str, Base]) -> float | None:
    """Of what the gate compares with, where it exists."""
    evaluation, scoring = request.evaluation, scoring_of(run)
    if evaluation is None or scoring is None or evaluation.gate.no_worse_than is None:
        return None
    subject = run.parent if evaluation.gate.no_worse_than == "parent" else None
    key = evaluations.key_for(bases[request.base].sha256, subject, scoring, evaluation)
    return evaluations.find_score(session, key)
