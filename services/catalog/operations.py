"""Operations of a model as their client sees them: submitted, looked at, cancelled.

Invariant: an operation is stored before its client hears of it, once per number or key, and never changes its content.
"""

from __future__ import annotations

import uuid
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import file_uses, models, order, outcomes, paths, sessions, signals
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import ModelRow, OperationRow, SessionRow
from services.catalog.retention import OPTIMIZER
from shared.catalog.operations import Failure, OperationView, Submit
from shared.errors import Refused
from shared.operations.payload import LoadPayload, Payload, ReverseKlPayload, SavePayload

__all__ = ["MODEL_KINDS", "READ_KINDS", "cancel", "find", "locked", "show", "submit"]

READ_KINDS = ("save_weights", "save_sampler_weights", "load_weights", "reverse_kl")
"""Those whose payload names something of the catalog's."""
MODEL_KINDS = (*READ_KINDS, "forward", "forward_backward", "optim_step", "unload_model")


def submit(
    session: Session, request: Submit, payload: Payload | None, rules: OperationRules, now: float
) -> OperationView:
    """`payload`: decoded, for READ_KINDS. What it asks for and cannot have is an operation that failed, so that its
    number is used and nothing waits for it. Raises Refused: 400, 404 for a model that is not there, 409 for another
    content under the number, 410 for a session that is over, 429 too far ahead of the work."""
    model = models.find(session, request.model_id, request.tenant)
    owner = sessions.find(session, model.session_id, None, lock=True) if model.session_id is not None else None
    session.refresh(model, with_for_update=True)  # behind its session, as by whoever ends that
    outcomes.check_number("seq_id", request.seq_id)
    known = _known(session, request)
    if known is not None:
        if (known.digest, known.kind) != (request.digest, request.kind):
            message = f"operation {request.seq_id} of {model.model_id} exists with another content"
            raise Refused(f"{message}; number the next one higher", code="other_payload", status=409)
        return outcomes.view(known, now)
    _check_open(owner, model, now)
    _check_number(session, request, model, rules)
    details, failure = _read(session, request, payload, model, now)
    row = _add(session, request, model, details, now)
    model.last_seq, model.last_request_at = max(model.last_seq, request.seq_id), now
    if failure is not None:
        outcomes.fail(session, row, failure.message, failure.category, now)
        models.settle(session, model, rules, now)
    elif request.kind == "unload_model":
        models.begin_unload(session, model, rules, now)
    signals.operations_wait(session, model, rules, now)
    return outcomes.view(row, now)


def _known(session: Session, request: Submit) -> OperationRow | None:
    query = select(OperationRow).where(OperationRow.model_id == request.model_id)
    if request.key:
        query = query.where(OperationRow.key == request.key)
    elif request.seq_id:
        query = query.where(OperationRow.seq_id == request.seq_id, OperationRow.place == 0)
    elif request.kind == "unload_model":
        query = query.where(OperationRow.kind == "unload_model")
    else:
        return None
    return session.scalars(query.limit(1)).first()


def _check_open(owner: SessionRow | None, model: ModelRow, now: float) -> None:
    if owner is not None:
        sessions.touch(owner, now)
    if model.state != "active":
        raise Refused(f"model {model.model_id} is unloaded; create another, from its saved weights", code="unloaded")


def _check_number(session: Session, request: Submit, model: ModelRow, rules: OperationRules) -> None:
    number = request.seq_id
    if request.kind not in MODEL_KINDS:
        raise Refused(f"{request.kind} is no operation of a model; those are {', '.join(MODEL_KINDS)}")
    if number and number < model.next_seq:
        raise Refused(
            f"seq_id {number} was passed over: {model.model_id} is at {model.next_seq}; "
            f"number the next one {model.last_seq + 1}",
            code="seq_id_passed",
        )
    if not number and request.kind != "unload_model" and order.open_count(session, model) >= rules.operation_backlog:
        raise Refused(
            f"{rules.operation_backlog} operations of {model.model_id} are open, which is the most; wait for results",
            code="too_many_operations",
            status=429,
        )
    if number - model.next_seq >= rules.operation_backlog:
        raise Refused(
            f"seq_id {number} is {number - model.next_seq} ahead of the work on {model.model_id}, "
            f"at most {rules.operation_backlog} may be; wait for results",
            code="too_many_operations",
            status=429,
        )


def _read(
    session: Session, request: Submit, payload: Payload | None, model: ModelRow, now: float
) -> tuple[dict[str, Any], Failure | None]:
    if request.failure is not None:
        return {}, request.failure
    try:
        return _details(session, request, payload, model, now), None
    except Refused as refusal:
        return {}, Failure(message=str(refusal), category="user")


def _details(session: Session, request: Submit, payload: Payload | None, model: ModelRow, now: float) -> dict[str, Any]:
    """What the catalog needs to know of the payload; paths are resolved here."""
    match request.kind, payload:
        case (("save_weights" | "save_sampler_weights"), SavePayload()):
            return _save(request, payload)
        case "load_weights", LoadPayload():
            return _load(session, payload, model, now)
        case "reverse_kl", ReverseKlPayload():
            return _teacher(session, payload, model, now)
        case kind, _ if kind in READ_KINDS:
            raise Refused(f"the payload of {kind} is a {type(payload).__name__}")
    return {}


def _save(request: Submit, payload: SavePayload) -> dict[str, Any]:
    if (payload.kind == "weights") != (request.kind == "save_weights"):
        raise Refused(f"{request.kind} cannot save {payload.kind}")
    if payload.name:
        paths.check_name(payload.name)
    elif payload.kind == "weights":
        raise Refused("save_weights needs a name", code="bad_path")
    elif payload.sampling_session_seq_id is None:
        raise Refused("save_sampler_weights needs a name, or a sampling_session_seq_id to be ephemeral")
    else:
        outcomes.check_number("sampling_session_seq_id", payload.sampling_session_seq_id)
    if payload.ttl_s is not None and payload.ttl_s <= 0:
        raise Refused(f"ttl_seconds {payload.ttl_s:g} is not above 0")
    return {
        "name": payload.name,
        "ttl_s": payload.ttl_s,
        "overwrite": payload.overwrite,
        "sampling_session_seq_id": payload.sampling_session_seq_id,
    }


def _load(session: Session, payload: LoadPayload, model: ModelRow, now: float) -> dict[str, Any]:
    origin = paths.resolve(session, payload.path, model.tenant, now, hold=True)
    paths.check_fits(origin, model.base, models.view(model).lora)
    assert origin.checkpoint is not None
    reference = paths.taken_from(origin.checkpoint, payload.optimizer)
    return {
        "path": payload.path,
        "optimizer": payload.optimizer,
        "reference": reference.model_dump(mode="json"),
        "reference_lora": origin.lora.model_dump(mode="json"),
        "has_optimizer": OPTIMIZER in reference.files,
    }


def _teacher(session: Session, payload: ReverseKlPayload, model: ModelRow, now: float) -> dict[str, Any]:
    """What a reverse KL is measured from: of any shape, on the same base."""
    origin = paths.resolve(session, payload.reference, model.tenant, now, hold=True)
    paths.check_fits(origin, model.base, origin.lora)
    assert origin.checkpoint is not None
    reference = paths.taken_from(origin.checkpoint, optimizer=False)
    return {
        "path": payload.reference,
        "reference": reference.model_dump(mode="json"),
        "reference_lora": origin.lora.model_dump(mode="json"),
        "has_optimizer": False,
    }


def _add(session: Session, request: Submit, model: ModelRow, details: dict[str, Any], now: float) -> OperationRow:
    number, place = request.seq_id, 0
    if not number:
        number = model.last_seq
        behind = select(OperationRow.place).where(OperationRow.model_id == model.model_id)
        behind = behind.where(OperationRow.seq_id == number).order_by(OperationRow.place.desc()).limit(1)
        place = (session.scalars(behind).first() or 0) + 1
    row = OperationRow(
        request_id=uuid.uuid4().hex,
        tenant=model.tenant,
        kind=request.kind,
        state="queued",
        model_id=model.model_id,
        seq_id=number,
        place=place,
        key=request.key or None,
        digest=request.digest,
        payload=request.payload.model_dump(mode="json"),
        details=details,
        in_state=False,
        takes=0,
        issues=1,
        accepted_at=now,
        expired=False,
    )
    session.add(row)
    session.flush()
    files = [request.payload.file] if request.payload.file is not None else []
    if "reference" in details:
        files += paths.reference_of(details).files.values()
    file_uses.use(session, outcomes.use_of(row), files)
    return row


def find(session: Session, request_id: str, tenant: str | None) -> OperationRow:
    """Raises Refused (404), also for another tenant's."""
    row = session.scalars(select(OperationRow).where(OperationRow.request_id == request_id)).one_or_none()
    if row is None or (tenant is not None and row.tenant != tenant):
        raise Refused(f"there is no operation {request_id[:40]}", code="not_found", status=404)
    return row


def locked(session: Session, request_id: str, tenant: str | None) -> tuple[OperationRow, ModelRow | None]:
    """The same, to be changed, with its model; that is locked first, as by whoever takes its operations."""
    row = find(session, request_id, tenant)
    model = models.find(session, row.model_id, None, lock=True) if row.model_id is not None else None
    session.refresh(row, with_for_update=True)
    return row, model


def show(session: Session, request_id: str, tenant: str | None, now: float) -> OperationView:
    return outcomes.view(find(session, request_id, tenant), now)


def cancel(session: Session, request_id: str, tenant: str | None, rules: OperationRules, now: float) -> OperationView:
    """What no worker has taken fails as cancelled; everything else stays as it is."""
    row, model = locked(session, request_id, tenant)
    if row.state == "queued" and row.worked_at is None and row.kind != "unload_model":
        outcomes.fail(session, row, "cancelled by its client", "user", now)
        if model is not None:
            models.settle(session, model, rules, now)
            signals.operations_wait(session, model, rules, now)
    return outcomes.view(row, now)
