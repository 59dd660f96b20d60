"""Saves to sample with: a committed training checkpoint is exported, and the save is done once the revision is
registered.

In: a save that its learner is through with; the commit, or the failure, of its export. Out: the path or the sampler of
the revision. Invariant: one state is exported once, however many saves name it; a revision that no path names is
ephemeral.
"""

from __future__ import annotations

from mint_schemas.commands import CheckpointRef, ExportRequested
from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from services.catalog import (
    commands,
    emit,
    ephemeral,
    file_uses,
    models,
    outcomes,
    path_changes,
    paths,
    samplers,
    sessions,
)
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import ModelRow, OperationRow
from services.catalog.orders import lora_of, parent_at
from services.catalog.register import register
from services.catalog.tables import CommandRow, RevisionRow, RunRow
from shared.catalog.api import ExportResult
from shared.errors import Refused

__all__ = ["begin", "export_failed", "run_ids", "settle"]


def begin(
    session: Session,
    model: ModelRow,
    run: RunRow,
    row: OperationRow,
    checkpoint: CheckpointRef,
    rules: OperationRules,
    now: float,
) -> None:
    """The training checkpoint is committed: have it exported, unless it is already."""
    name = row.details["name"]
    at = paths.PathName(model.model_id, "sampler_weights", name)
    taken = path_changes.is_taken(session, at, now) if name and not row.details["overwrite"] else None
    if taken is not None:
        outcomes.fail(session, row, taken, "user", now)
        return
    row.worked_at = now
    row.export = commands.command_id(run.run_id, "export", checkpoint.step)
    file_uses.use(session, outcomes.use_of(row), checkpoint.files.values())
    export = session.get(CommandRow, row.export)
    if export is None or export.state == "closed":
        _issue(session, run, _request(session, run, checkpoint), export, rules, now)
    session.flush()
    settle(session, run, rules, now)


def _request(session: Session, run: RunRow, checkpoint: CheckpointRef) -> ExportRequested:
    return ExportRequested(
        command_id=commands.command_id(run.run_id, "export", checkpoint.step),
        run_id=run.run_id,
        policy=run.policy or "",
        base=run.base or "",
        step=checkpoint.step,
        checkpoint=checkpoint,
        lora=lora_of(run),
        parent=parent_at(session, run, checkpoint.step),
    )


def _issue(
    session: Session, run: RunRow, body: ExportRequested, failed: CommandRow | None, rules: OperationRules, now: float
) -> None:
    """One that failed before is opened again, with the files of this save."""
    if failed is None:
        commands.issue(session, run, body, body.step, now, rules.deadline_s)
        return
    failed.state, failed.body, failed.takes, failed.failure = "open", body.model_dump(mode="json"), 0, ""
    failed.deadline_at = now + rules.deadline_s
    emit.command(session, run, body, now, replay=failed.issues)
    failed.issues += 1


def _locked(session: Session, run: RunRow) -> ModelRow:
    """Before its saves are looked at, which another catalog may be ending just now."""
    return session.scalars(select(ModelRow).where(ModelRow.run_id == run.run_id).with_for_update()).one()


def _waiting(session: Session, model: ModelRow) -> list[OperationRow]:
    query = select(OperationRow).where(OperationRow.model_id == model.model_id, OperationRow.done_at.is_(None))
    query = query.where(OperationRow.worked_at.is_not(None), OperationRow.export.is_not(None))
    # Put in order here: asked to, the database would walk through every operation that the model ever had.
    return sorted(session.scalars(query), key=lambda row: (row.seq_id, row.place))


def run_ids() -> Select[str]:
    """Of the models that have one waiting."""
    waiting = select(OperationRow.model_id).where(
        OperationRow.state.in_(("queued", "running")), OperationRow.kind == "save_sampler_weights"
    )
    exported = waiting.where(OperationRow.export.is_not(None))
    return select(ModelRow.run_id).where(ModelRow.model_id.in_(exported))


def settle(session: Session, run: RunRow, rules: OperationRules, now: float) -> None:
    """Register what has been exported, and end the saves that wait for it."""
    model = _locked(session, run)
    for row in _waiting(session, model):
        export = session.get(CommandRow, row.export)
        if export is None or export.state != "committed":
            continue
        known = select(RevisionRow.seq).where(RevisionRow.export_command == export.command_id)
        fresh = session.scalars(known).first() is None
        revision = register(session, run, export.step, now)
        if fresh:
            held = ExportResult.model_validate(export.result).manifest
            file_uses.use(session, ephemeral.revision_use(revision.revision), [held])
            revision.ephemeral = True
        if revision.ephemeral:
            is_over = model.session_id is not None and sessions.find(session, model.session_id, None).state != "open"
            revision.expires_at = now + (rules.grace_s if is_over else rules.ephemeral_ttl_s)
        _complete(session, model, row, revision, rules, now)
        file_uses.drop(session, outcomes.use_of(row))
        models.settle(session, model, rules, now)


def _complete(
    session: Session, model: ModelRow, row: OperationRow, revision: RevisionRow, rules: OperationRules, now: float
) -> None:
    try:
        if row.details["name"]:
            result = outcomes.saved(path=_put(session, model, row, revision, rules, now))
        else:
            number = row.details["sampling_session_seq_id"]
            result = outcomes.saved(sampling_session_id=samplers.for_save(session, model, number, revision, row, now))
    except Refused as refusal:
        outcomes.fail(session, row, str(refusal), "user", now)
        return
    outcomes.finish(session, row, result, now)


def _put(
    session: Session, model: ModelRow, row: OperationRow, revision: RevisionRow, rules: OperationRules, now: float
) -> str:
    at = paths.PathName(model.model_id, "sampler_weights", row.details["name"])
    taken = None if row.details["overwrite"] else path_changes.is_taken(session, at, now)
    if taken is not None:
        raise Refused(taken, code="path_taken")
    what = path_changes.Named(model.run_id, revision.step, model.lora, model.train_unembed, {}, revision)
    path_changes.put(session, at, model.tenant, model.base, what, row.details["ttl_s"], rules, now)
    return paths.uri(at.model_id, at.kind, at.name)


def export_failed(
    session: Session, run: RunRow, command: CommandRow, reason: str, rules: OperationRules, now: float
) -> None:
    """The saves that wait for it fail; the model goes on."""
    model = _locked(session, run)
    command.state = "closed"
    for row in _waiting(session, model):
        if row.export == command.command_id:
            message = f"the adapter of step {command.step} could not be exported: {reason}"
            outcomes.fail(session, row, message, "server", now)
            file_uses.drop(session, outcomes.use_of(row))
            models.settle(session, model, rules, now)
