"""Commit of an operation: the one transaction that makes its result, and the state after it, exist.

Conditional on the lease's epoch, on the run being active, and on being the next operation of its model. Invariant: an
operation has one outcome; whoever commits it again gets the one that won.
"""

from __future__ import annotations

from collections.abc import Iterable

from mint_schemas.commands import CheckpointRef
from mint_schemas.common import FileRef
from mint_schemas.events import PolicyUpdated
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from services.catalog import (
    emit,
    file_uses,
    models,
    operations,
    order,
    outcomes,
    path_changes,
    paths,
    runs,
    sampler_saves,
    samples,
    signals,
)
from services.catalog.leases import lease_of
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import ModelRow, OperationRow
from services.catalog.tables import CheckpointRow, RunRow
from shared.catalog.operations import CommitOperation, Content, OperationView
from shared.errors import Refused
from shared.rl.checkpoint import ADAPTER_FILE, STATE_FILE

__all__ = ["commit", "is_open", "named_files"]

STEPPING = ("optim_step", "load_weights")
"""What a training checkpoint of its own follows."""


def named_files(request: CommitOperation) -> list[FileRef]:
    """Every file that an outcome names; they must be in the store before it is committed."""
    refs = list(request.checkpoint.files.values()) if request.checkpoint is not None else []
    if request.result is not None and request.result.file is not None:
        refs.append(request.result.file)
    return refs


def is_open(session: Session, request_id: str) -> bool:
    """Whether a commit could still be the one that wins."""
    return operations.find(session, request_id, None).worked_at is None


def commit(session: Session, request: CommitOperation, rules: OperationRules, now: float) -> OperationView:
    """Raises Refused (409): `stale_epoch`, `run_ended`, `out_of_order`, `wrong_step`."""
    row, model = operations.locked(session, request.request_id, None)
    if model is None:
        return outcomes.view(row, now) if row.worked_at is not None else samples.commit(session, row, request, now)
    if row.worked_at is not None:
        _check_lease(session, model, request, now)
        return outcomes.view(row, now)
    run = _check(session, model, row, request, now)
    if request.failure is not None:
        outcomes.fail(session, row, request.failure.message, request.failure.category, now)
    else:
        _accept(session, model, run, row, request, rules, now)
    models.settle(session, model, rules, now)
    return outcomes.view(row, now)


def _check(session: Session, model: ModelRow, row: OperationRow, request: CommitOperation, now: float) -> RunRow:
    run = runs.find(session, model.run_id)
    if run is None or run.state not in runs.ACTIVE:
        raise _refused("run_ended", f"model {model.model_id} is unloaded: {run.outcome if run is not None else ''}")
    _check_lease(session, model, request, now)
    first = order.ready(session, model, 1)
    if not first or first[0].seq != row.seq:
        message = f"operation {row.seq_id} of {model.model_id} is not the next; that is {model.next_seq}"
        raise _refused("out_of_order", message)
    return run


def _check_lease(session: Session, model: ModelRow, request: CommitOperation, now: float) -> None:
    """Also of one that is over: another learner may have done it since, so that what this one's slot holds is not the
    state that was committed, to the last bit."""
    if lease_of(session, signals.writer(model.policy), request.worker, request.epoch, now) is None:
        message = f"worker {request.worker} does not hold policy {model.policy} under epoch {request.epoch} any more"
        raise _refused("stale_epoch", message)


def _refused(code: str, message: str) -> Refused:
    return Refused(message, code=code, status=409)


def _accept(
    session: Session,
    model: ModelRow,
    run: RunRow,
    row: OperationRow,
    request: CommitOperation,
    rules: OperationRules,
    now: float,
) -> None:
    if row.kind in STEPPING:
        _step(session, model, run, row, _checkpoint(row, request), request, now)
        outcomes.finish(session, row, _result(row, request), now)
    elif row.kind == "save_weights":
        _save(session, model, row, _checkpoint(row, request), rules, now)
    elif row.kind == "save_sampler_weights":
        checkpoint = _checkpoint(row, request)
        _keep_saved(session, model, run, row, checkpoint)
        sampler_saves.begin(session, model, run, row, checkpoint, rules, now)
    else:
        row.in_state = row.kind in order.ACCUMULATING
        outcomes.finish(session, row, _result(row, request), now)


def _result(row: OperationRow, request: CommitOperation) -> Content:
    if request.result is None:
        raise Refused(f"the commit of {row.request_id} has neither a result nor a failure")
    return request.result


def _checkpoint(row: OperationRow, request: CommitOperation) -> CheckpointRef:
    missing = {ADAPTER_FILE, STATE_FILE} - (
        request.checkpoint.files.keys() if request.checkpoint is not None else set()
    )
    if request.checkpoint is None or missing:
        raise Refused(f"the commit of {row.kind} {row.request_id} names no {', '.join(sorted(missing))}")
    return request.checkpoint


def _last_step(session: Session, run: RunRow) -> int:
    return session.scalar(select(func.max(CheckpointRow.step)).where(CheckpointRow.run_id == run.run_id)) or 0


def _step(
    session: Session,
    model: ModelRow,
    run: RunRow,
    row: OperationRow,
    checkpoint: CheckpointRef,
    request: CommitOperation,
    now: float,
) -> None:
    """The model is in the state of this training checkpoint, and no gradients are added to it yet."""
    last = _last_step(session, run)
    if checkpoint.step <= last:
        message = f"the training checkpoint of {row.kind} {row.seq_id} has step {checkpoint.step}, the run is at {last}"
        raise _refused("wrong_step", message)
    changed = _adapter_changed(session, model, run, checkpoint)
    _add_checkpoint(session, run, checkpoint, row)
    model.state_step = checkpoint.step
    added = update(OperationRow).where(OperationRow.model_id == model.model_id, OperationRow.in_state.is_(True))
    session.execute(added.values(in_state=False))
    _announce(session, run, row, checkpoint, changed, request, now)


def _adapter_changed(session: Session, model: ModelRow, run: RunRow, checkpoint: CheckpointRef) -> bool:
    before = session.get(CheckpointRow, (run.run_id, model.state_step))
    files = before.files if before is not None else (model.start or {}).get("files", {})
    known = files.get(ADAPTER_FILE)
    return known is None or known["sha256"] != checkpoint.files[ADAPTER_FILE].sha256


def _add_checkpoint(session: Session, run: RunRow, checkpoint: CheckpointRef, row: OperationRow) -> None:
    file_uses.name(session, checkpoint.files.values(), outcomes.use_of(row))
    session.add(
        CheckpointRow(
            run_id=run.run_id,
            step=checkpoint.step,
            policy=run.policy or "",
            files={name: ref.model_dump(mode="json") for name, ref in checkpoint.files.items()},
            has_optimizer="optimizer.safetensors" in checkpoint.files,
        )
    )
    session.flush()


def _announce(
    session: Session,
    run: RunRow,
    row: OperationRow,
    checkpoint: CheckpointRef,
    changed: bool,
    request: CommitOperation,
    now: float,
) -> None:
    body = PolicyUpdated(
        run_id=run.run_id,
        policy=run.policy or "",
        base=run.base or "",
        command_id=row.request_id,
        step=checkpoint.step,
        checkpoint=checkpoint,
        adapter_changed=changed,
        metrics=dict(request.metrics),
        seconds=max(0.0, now - row.accepted_at),
    )
    emit.fact(session, run, "mint.v1.policy.updated", row.request_id, body, now)


def _save(
    session: Session, model: ModelRow, row: OperationRow, checkpoint: CheckpointRef, rules: OperationRules, now: float
) -> None:
    at = paths.PathName(model.model_id, "weights", row.details["name"])
    taken = None if row.details["overwrite"] else path_changes.is_taken(session, at, now)
    if taken is not None:
        outcomes.fail(session, row, taken, "user", now)
        return
    what = path_changes.Named(model.run_id, checkpoint.step, model.lora, model.train_unembed, dict(checkpoint.files))
    path_changes.put(session, at, model.tenant, model.base, what, row.details["ttl_s"], rules, now)
    outcomes.finish(session, row, outcomes.saved(path=paths.uri(at.model_id, at.kind, at.name)), now)


def _keep_saved(session: Session, model: ModelRow, run: RunRow, row: OperationRow, checkpoint: CheckpointRef) -> None:
    """A training checkpoint of the save's own step; of the state's, where it stays there, the one that is there."""
    known = session.get(CheckpointRow, (run.run_id, checkpoint.step))
    if known is None and (checkpoint.step > _last_step(session, run) or not _steps(session, run)):
        _add_checkpoint(session, run, checkpoint, row)
        return
    same = known is not None and known.files[ADAPTER_FILE]["sha256"] == checkpoint.files[ADAPTER_FILE].sha256
    if not same:
        message = f"{row.kind} {row.seq_id} saves step {checkpoint.step}, which is not the state of {model.model_id}"
        raise _refused("wrong_step", message)


def _steps(session: Session, run: RunRow) -> Iterable[int]:
    return session.scalars(select(CheckpointRow.step).where(CheckpointRow.run_id == run.run_id).limit(1)).all()
