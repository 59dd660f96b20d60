"""From rows to what the API shows. Read only; each list is one page."""

from __future__ import annotations

from mint_schemas.common import FileRef
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from services.catalog import runs
from services.catalog.clock import iso, iso_or_none
from services.catalog.readiness import Readiness
from services.catalog.tables import (
    AliasMoveRow,
    AliasRow,
    CheckpointRow,
    EvaluationRow,
    JournalRow,
    PolicyRow,
    RevisionRow,
    RunRow,
)
from shared.adapters.manifest import Manifest
from shared.catalog.api import (
    AliasMove,
    AliasView,
    EvaluationView,
    JournalEntry,
    PolicyView,
    RevisionView,
    RunView,
)


def run_view(session: Session, row: RunRow) -> RunView:
    step = session.scalar(select(func.max(CheckpointRow.step)).where(CheckpointRow.run_id == row.run_id))
    return RunView.model_validate(
        {
            "run_id": row.run_id,
            "policy": row.policy,
            "base": row.base,
            "state": row.state,
            "method": row.method,
            "step": step or 0,
            "steps": row.steps,
            "outcome": row.outcome,
            "created_at": iso(row.created_at),
            "started_at": iso_or_none(row.started_at),
            "ended_at": iso_or_none(row.ended_at),
            "revision": runs.result_of(session, row),
            "promoted": row.promoted,
            "request_source": row.request_source,
            "request_id": row.request_id,
            "traceparent": row.traceparent,
            "request": row.request,
        }
    )


def policy_view(session: Session, row: PolicyRow) -> PolicyView:
    held = session.scalars(select(AliasRow).where(AliasRow.policy == row.policy).order_by(AliasRow.alias)).all()
    active = session.scalars(select(RunRow.run_id).where(RunRow.active_policy == row.policy)).first()
    return PolicyView(
        policy=row.policy,
        tenant=row.tenant,
        base=row.base,
        created_at=iso(row.created_at),
        revisions=row.last_number,
        aliases={alias.alias: alias.revision for alias in held},
        active_run=active,
        pinned=row.pinned,
    )


def revision_view(session: Session, row: RevisionRow, readiness: Readiness) -> RevisionView:
    aliases = session.scalars(
        select(AliasRow.alias).where(AliasRow.revision == row.revision).order_by(AliasRow.alias)
    ).all()
    score = session.scalars(
        select(EvaluationRow.score)
        .where(EvaluationRow.revision == row.revision)
        .order_by(EvaluationRow.seq.desc())
        .limit(1)
    ).first()
    return RevisionView(
        revision=row.revision,
        number=row.number,
        policy=row.policy,
        base=row.base,
        run_id=row.run_id,
        step=row.step,
        parent=row.parent,
        adapter_sha256=row.adapter_sha256,
        adapter_bytes=row.adapter_bytes,
        zero_delta=row.zero_delta,
        created_at=iso(row.created_at),
        aliases=tuple(aliases),
        manifest=Manifest.model_validate(row.manifest),
        ready_on=readiness.ready.get(row.revision, ()),
        score=score,
    )


def alias_view(row: AliasRow) -> AliasView:
    return AliasView(
        policy=row.policy, alias=row.alias, revision=row.revision, version=row.version, previous=row.previous
    )


def moves(session: Session, policy: str) -> list[AliasMove]:
    """Oldest first."""
    rows = session.scalars(select(AliasMoveRow).where(AliasMoveRow.policy == policy).order_by(AliasMoveRow.seq))
    return [
        AliasMove(
            policy=row.policy,
            alias=row.alias,
            version=row.version,
            revision=row.revision,
            previous=row.previous,
            reason=row.reason,
            actor=row.actor,
            run_id=row.run_id,
            at=iso(row.at),
        )
        for row in rows
    ]


def journal(session: Session, run_id: str, after: int) -> list[JournalEntry]:
    query = select(JournalRow).where(JournalRow.run_id == run_id, JournalRow.seq > after).order_by(JournalRow.seq)
    return [JournalEntry(seq=row.seq, at=iso(row.at), type=row.type, body=row.body) for row in session.scalars(query)]


def evaluations(session: Session, run_id: str | None, revision: str | None) -> list[EvaluationView]:
    query = select(EvaluationRow).order_by(EvaluationRow.seq)
    if run_id is not None:
        query = query.where(EvaluationRow.run_id == run_id)
    if revision is not None:
        query = query.where(EvaluationRow.revision == revision)
    return [
        EvaluationView(
            evaluation_id=row.command_id,
            run_id=row.run_id,
            policy=row.policy,
            base=row.base,
            revision=row.revision,
            adapter_sha256=row.adapter_sha256,
            task_sha256=row.task_sha256,
            scorer=row.scorer,
            sampling=row.sampling,
            items=row.items,
            score=row.score,
            details=FileRef(**row.details),
            created_at=iso(row.created_at),
        )
        for row in session.scalars(query)
    ]
