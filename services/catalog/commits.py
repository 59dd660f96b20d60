"""Commit: the one transaction that makes a worker's result exist.

Conditional on the lease's epoch (by the catalog's clock), on the run being active, and on the previous
step. Invariant: a command has at most one result; whoever commits it again gets the event that won.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mint_schemas.common import FileRef
from mint_schemas.events import PolicyUpdated, RevisionEvaluated, RevisionExported, RolloutCompleted
from pydantic import BaseModel
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from services.catalog import commands, emit, evaluations, leases, proofs, runs, sampler_saves
from services.catalog.model_end import TINKER
from services.catalog.operation_rules import OperationRules
from services.catalog.tables import CheckpointRow, CommandRow, FileRow, LeaseRow, RunRow
from shared.bases import Base
from shared.catalog.api import (
    CommitAnswer,
    CommitRequest,
    EvaluationResult,
    ExportResult,
    OutgoingEvent,
    Result,
    RolloutResult,
    UpdateResult,
)

EVENT_TYPES = {
    "rollout": "mint.v1.rollout.completed",
    "update": "mint.v1.policy.updated",
    "export": "mint.v1.revision.exported",
    "evaluation": "mint.v1.revision.evaluated",
}


@dataclass(frozen=True)
class CommitRefused:
    """`code`: stale_epoch, run_ended, wrong_step, or not_found."""

    code: str
    message: str


def commit(
    session: Session, request: CommitRequest, bases: Mapping[str, Base], now: float
) -> CommitAnswer | CommitRefused:
    row = session.get(CommandRow, request.command_id)
    if row is None:
        return CommitRefused("not_found", f"the catalog knows no command {request.command_id}")
    if row.event is not None:
        return CommitAnswer(event=OutgoingEvent.model_validate(row.event))
    run = runs.find(session, row.run_id)
    if run is None or run.state not in runs.ACTIVE:
        return CommitRefused("run_ended", f"run {row.run_id} is {run.state if run else 'unknown'}: {_why(run)}")
    if leases.held_lease(session, row, request.worker, request.epoch, now) is None:
        return CommitRefused(
            "stale_epoch", f"{request.worker} does not hold {row.resource} under epoch {request.epoch} any more"
        )
    if row.state != "open" or not _is_next(session, run, row):
        return CommitRefused("wrong_step", f"{row.command_id} is not the next step of its run")
    fault = _fault(run, row, request.result, bases)
    if fault is not None and run.method == TINKER:
        sampler_saves.export_failed(session, run, row, fault, OperationRules(bases), now)
        return CommitRefused("run_ended", f"the save failed: {fault}")
    if fault is not None:
        runs.end(session, run, "failed", fault, bases, now)
        return CommitRefused("run_ended", f"the run failed: {fault}")
    return CommitAnswer(event=_accept(session, run, row, request.result, bases, now))


def _why(run: RunRow | None) -> str:
    return run.outcome if run else "it was never requested here"


def _is_next(session: Session, run: RunRow, row: CommandRow) -> bool:
    """An update follows the committed training checkpoint of the step before it."""
    if row.kind != "update":
        return True
    last = session.scalar(select(func.max(CheckpointRow.step)).where(CheckpointRow.run_id == run.run_id))
    return row.step == (last or 0) + 1


def _fault(run: RunRow, row: CommandRow, result: Result, bases: Mapping[str, Base]) -> str | None:
    fault = proofs.fault_in(commands.body_of(row), result, bases[run.base or ""].sha256)
    if fault is None and isinstance(result, EvaluationResult):
        measured, expected = (result.task_sha256, result.scorer), (run.task_sha256, run.scorer)
        if measured != expected:
            return f"the evaluation was scored by (task, scorer) {measured}, the run's is {expected}"
    return fault


def _accept(
    session: Session, run: RunRow, row: CommandRow, result: Result, bases: Mapping[str, Base], now: float
) -> OutgoingEvent:
    for ref in named_files(result):
        if session.get(FileRow, ref.key) is None:
            session.add(FileRow(key=ref.key, sha256=ref.sha256, size=ref.size, owner=row.command_id))
            session.flush()
    if isinstance(result, UpdateResult):
        files = {name: ref.model_dump(mode="json") for name, ref in result.checkpoint.files.items()}
        session.add(CheckpointRow(run_id=run.run_id, step=row.step, policy=run.policy, files=files, has_optimizer=True))
    if isinstance(result, EvaluationResult):
        evaluations.record(session, run, row, result, bases[run.base or ""].sha256, now)
    body = _event_body(run, row, result).model_dump(mode="json")
    type_ = EVENT_TYPES[row.kind]
    event = OutgoingEvent(type=type_, id=row.command_id, token=row.token, subject=run.policy, body=body)
    row.state, row.committed_at = "committed", now
    row.result, row.event = result.model_dump(mode="json"), event.model_dump(mode="json")
    lease = session.get(LeaseRow, row.resource)
    if lease is not None:
        lease.expires_at = now
    emit.journal(session, run.run_id, type_, row.command_id, body, now)
    return event


def named_files(result: Result) -> list[FileRef]:
    """Every file that a result names; they must be in the store before it is committed."""
    match result:
        case RolloutResult():
            return [result.record]
        case UpdateResult():
            return list(result.checkpoint.files.values())
        case ExportResult():
            return [result.manifest, *result.content.files.values()]
        case EvaluationResult():
            return [result.details]


def _event_body(run: RunRow, row: CommandRow, result: Result) -> BaseModel:
    fact = {"run_id": run.run_id, "policy": run.policy, "base": run.base, "command_id": row.command_id}
    said = result.model_dump(exclude={"kind", "content"})
    match result:
        case RolloutResult():
            return RolloutCompleted(**fact, **said, step=row.step)
        case UpdateResult():
            return PolicyUpdated(**fact, **said, step=row.step)
        case ExportResult(content=manifest):
            return RevisionExported(
                **fact,
                **said,
                step=row.step,
                adapter_sha256=manifest.adapter_sha256,
                adapter_bytes=manifest.adapter_bytes,
                zero_delta=manifest.zero_delta,
            )
        case EvaluationResult():
            return RevisionEvaluated(**fact, **said)
