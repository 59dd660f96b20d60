"""A learner's side of operations: take those of a policy in order, renew, release.

Invariant: a policy has one writer at a time, the holder of its lease; what it took and did not commit is handed out
again, from the same state. What takes its learner down again and again fails.
"""

from __future__ import annotations

from mint_schemas.commands import CheckpointRef
from mint_schemas.training import Lora
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from services.catalog import models, order, outcomes, runs, signals
from services.catalog.leases import grant, lease_of
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import ModelRow, OperationRow
from services.catalog.orders import checkpoint_of
from services.catalog.paths import reference_of
from services.catalog.tables import LeaseRow
from shared.catalog.api import RenewAnswer
from shared.catalog.operations import Operation, OperationsLease, OperationsTaken, TakeOperations
from shared.operations.state import state_id

__all__ = ["OPERATIONS", "release", "renew", "resource_of", "take"]

OPERATIONS = "operations"
"""What a lease of a policy is held for."""
MAX_LIMIT = 256


def take(session: Session, request: TakeOperations, rules: OperationRules, now: float) -> OperationsTaken:
    query = select(ModelRow).where(ModelRow.policy == request.policy).with_for_update()
    model = session.scalars(query).one_or_none()
    if model is None or model.state == "unloaded":
        return OperationsTaken(status="idle")
    lease = session.get(LeaseRow, signals.writer(model.policy))
    alive = lease if lease is not None and lease.expires_at > now else None
    mine = alive is not None and (alive.worker, alive.command_id) == (request.worker, OPERATIONS)
    own = mine and alive is not None and request.epoch == alive.epoch
    # A worker that was started again under its name need not wait for what it held before.
    if alive is not None and not own and not (mine and request.epoch == 0):
        return OperationsTaken(status="busy", retry_after_s=alive.expires_at - now)
    model.signalled_at = None
    rows = _takeable(session, model, request, rules, own, now)
    if not rows:
        return OperationsTaken(status="idle")
    if own and alive is not None:
        alive.expires_at, epoch = now + rules.lease_ttl_s, alive.epoch
    else:
        rows[0].takes += 1
        epoch = grant(session, signals.writer(model.policy), OPERATIONS, request.worker, now + rules.lease_ttl_s)
    for row in rows:
        row.state = "running"
    return _taken(session, model, rows, epoch, request.holds)


def _takeable(
    session: Session, model: ModelRow, request: TakeOperations, rules: OperationRules, own: bool, now: float
) -> list[OperationRow]:
    """What is next, past what has been taken too often."""
    limit = max(1, min(request.limit, MAX_LIMIT))
    while True:
        rows = order.ready(session, model, limit)
        if not rows or own or rows[0].takes < rules.max_takes:
            return rows
        said = f"; the last attempt said: {model.failure}" if model.failure else ""
        message = f"operation {rows[0].seq_id} was taken {rows[0].takes} times without a result{said}"
        outcomes.fail(session, rows[0], message, "server", now)
        models.settle(session, model, rules, now)


def _taken(session: Session, model: ModelRow, rows: list[OperationRow], epoch: int, holds: str) -> OperationsTaken:
    name = state_id(model.run_id, model.state_step, order.names_in_state(session, model))
    whole = holds != name
    return OperationsTaken(
        status="granted",
        epoch=epoch,
        run_id=model.run_id,
        model_id=model.model_id,
        base=model.base,
        lora=Lora.model_validate(model.lora),
        seed=model.seed,
        step=model.state_step,
        start=_start(session, model),
        fresh_optimizer=model.fresh_optimizer if model.state_step == 0 else False,
        state_id=name,
        replay=tuple(_operation(row, whole) for row in order.in_state(session, model, whole)),
        operations=tuple(_operation(row) for row in rows),
    )


def _start(session: Session, model: ModelRow) -> CheckpointRef | None:
    if model.state_step:
        return checkpoint_of(session, model.run_id, model.state_step)
    return CheckpointRef.model_validate(model.start) if model.start is not None else None


def _operation(row: OperationRow, whole: bool = True) -> Operation:
    """`whole`: with its payload, of which a client that steps seldom has many in a state."""
    named = "reference" in row.details
    return Operation.model_validate(
        {
            "request_id": row.request_id,
            "seq_id": row.seq_id,
            "kind": row.kind,
            "payload": (row.payload or {}) if whole else {},
            "reference": reference_of(row.details) if named else None,
            "reference_lora": row.details["reference_lora"] if named else None,
            "has_optimizer": bool(row.details.get("has_optimizer", False)),
        }
    )


def resource_of(session: Session, request: OperationsLease) -> str:
    """A sample is leased by its own name, which stands where a policy's would."""
    sample = request.request_id or request.policy.removeprefix("operation:")
    query = select(OperationRow.seq).where(OperationRow.request_id == sample, OperationRow.kind == "sample")
    if "/" not in sample and session.scalars(query).first() is not None:
        return signals.sample_resource(sample)
    return signals.writer(request.policy)


def renew(session: Session, request: OperationsLease, rules: OperationRules, now: float) -> RenewAnswer:
    """A lease that has expired is lost, even if nobody took it since."""
    resource = resource_of(session, request)
    if _is_over(session, resource):
        return RenewAnswer(held=False, cancelled=True)
    lease = lease_of(session, resource, request.worker, request.epoch, now)
    if lease is None:
        return RenewAnswer(held=False)
    lease.expires_at = now + rules.lease_ttl_s
    return RenewAnswer(held=True)


def _is_over(session: Session, resource: str) -> bool:
    kind, _, name = resource.partition(":")
    if kind == "operation":
        query = select(OperationRow.done_at).where(OperationRow.request_id == name)
        return session.scalars(query).one_or_none() is not None
    model = session.scalars(select(ModelRow).where(ModelRow.policy == name)).one_or_none()
    run = runs.find(session, model.run_id) if model is not None else None
    return run is None or run.state not in runs.ACTIVE


def release(session: Session, request: OperationsLease, rules: OperationRules, now: float) -> None:
    """Give the lease back at once. Without a `failure` (a shutdown, or nothing left) the take is given back too."""
    resource = resource_of(session, request)
    lease = lease_of(session, resource, request.worker, request.epoch, now)
    if lease is None:
        return
    lease.expires_at = now
    session.flush()
    if resource.startswith("operation:"):
        _put_back_sample(session, resource.removeprefix("operation:"), request, rules, now)
        return
    model = session.scalars(select(ModelRow).where(ModelRow.policy == request.policy).with_for_update()).one_or_none()
    if model is None:
        return
    model.failure = request.failure[:1000]
    put_back = update(OperationRow).where(OperationRow.model_id == model.model_id, OperationRow.done_at.is_(None))
    put_back = put_back.where(OperationRow.worked_at.is_(None), OperationRow.state == "running")
    session.execute(put_back.values(state="queued"))
    first = order.ready(session, model, 1)
    if first and not request.failure:
        first[0].takes = max(0, first[0].takes - 1)
        session.flush()
        signals.operations_wait(session, model, rules, now)


def _put_back_sample(
    session: Session, request_id: str, request: OperationsLease, rules: OperationRules, now: float
) -> None:
    row = session.scalars(select(OperationRow).where(OperationRow.request_id == request_id)).one()
    row.state = "queued"
    if request.failure:
        row.details = {**row.details, "failure": request.failure[:1000]}
    else:
        row.takes = max(0, row.takes - 1)
