"""The view of a run that its plan is made from: committed rows and the readiness of one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mint_schemas.training import Sft, TrainRequested
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from services.catalog import aliases, commands, evaluations, orders
from services.catalog.plan import Goal, Situation
from services.catalog.readiness import Readiness
from services.catalog.runs import Scoring
from services.catalog.tables import AliasRow, CheckpointRow, CommandRow, RevisionRow, RunRow
from shared.bases import Base


@dataclass(frozen=True)
class ReadyRules:
    timeout_s: float = 900.0
    min_ready: int = 1


def goal_of(request: TrainRequested) -> Goal:
    gate = request.evaluation.gate if request.evaluation else None
    return Goal(
        method=request.method.kind,
        steps=request.method.steps,
        save_every=request.method.save_every if isinstance(request.method, Sft) else None,
        evaluates=request.evaluation is not None,
        at_least=gate.at_least if gate else None,
        no_worse_than=gate.no_worse_than if gate else None,
        promote_to=request.promote_to,
    )


def look(
    session: Session, run: RunRow, bases: Mapping[str, Base], readiness: Readiness, rules: ReadyRules, now: float
) -> Situation:
    request = orders.request_of(run)
    done = session.scalar(select(func.max(CheckpointRow.step)).where(CheckpointRow.run_id == run.run_id)) or 0
    revision = session.scalars(
        select(RevisionRow.revision).where(RevisionRow.run_id == run.run_id, RevisionRow.step == done)
    ).one_or_none()
    score, reference_score = _scores(session, run, request, revision, bases)
    alias = session.get(AliasRow, (run.policy, request.promote_to)) if request.promote_to else None
    return Situation(
        goal=goal_of(request),
        parent=run.parent,
        open_command=commands.open_command(session, run.run_id),
        done=done,
        record=_committed(session, run, "rollout", done + 1),
        exported=_committed(session, run, "export", done),
        revision=revision,
        ready=readiness.counts(),
        failed=readiness.failed,
        waiting_for=run.waiting_for,
        waited_s=now - run.waiting_since if run.waiting_since is not None else 0.0,
        ready_timeout_s=rules.timeout_s,
        min_ready=rules.min_ready,
        score=score,
        reference_score=reference_score,
        alias_expected=run.alias_version or 0,
        alias_version=alias.version if alias else 0,
        alias_moved_by=aliases.last_mover(session, run.policy or "", request.promote_to or ""),
    )


def _committed(session: Session, run: RunRow, kind: str, step: int) -> bool:
    row = session.get(CommandRow, commands.command_id(run.run_id, kind, step))
    return row is not None and row.state == "committed"


def _scores(
    session: Session, run: RunRow, request: TrainRequested, last: str | None, bases: Mapping[str, Base]
) -> tuple[float | None, float | None]:
    """(of the run's last revision, of what the gate compares it with), where they exist."""
    evaluation = request.evaluation
    if evaluation is None or run.task_sha256 is None or run.scorer is None or last is None:
        return None, None
    scoring, base_sha256 = Scoring(run.task_sha256, run.scorer), bases[request.base].sha256
    own = evaluations.find_score(session, evaluations.key_for(base_sha256, last, scoring, evaluation))
    subject = run.parent if evaluation.gate.no_worse_than == "parent" else None
    reference = evaluations.find_score(session, evaluations.key_for(base_sha256, subject, scoring, evaluation))
    return own, reference
