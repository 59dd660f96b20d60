"""Models of the service interface: found, shown, unloaded.

Invariant: unloading waits for what was accepted before it; then the model's run is over.
"""

from __future__ import annotations

from mint_schemas.training import Lora
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from services.catalog import order, runs, sessions
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import ModelRow, OperationRow
from shared.catalog.operations import ModelPage, ModelView
from shared.errors import Refused

__all__ = ["begin_unload", "find", "list_models", "settle", "show", "unload_all", "view"]


def find(session: Session, model_id: str, tenant: str | None, lock: bool = False) -> ModelRow:
    """Raises Refused (404), also for another tenant's."""
    query = select(ModelRow).where(ModelRow.model_id == model_id)
    row = session.scalars(query.with_for_update() if lock else query).one_or_none()
    if row is None or (tenant is not None and row.tenant != tenant):
        raise Refused(f"there is no model {model_id[:120]}", code="not_found", status=404)
    return row


def begin_unload(session: Session, model: ModelRow, rules: OperationRules, now: float) -> None:
    """Nothing more is accepted; it is over when what was accepted is."""
    if model.state == "active":
        model.state = "closing"
        settle(session, model, rules, now)


def unload_all(session: Session, session_id: str, rules: OperationRules, now: float) -> None:
    """The models of a session that is over."""
    for model in sessions.models_of(session, session_id):
        begin_unload(session, model, rules, now)


def settle(session: Session, model: ModelRow, rules: OperationRules, now: float) -> None:
    """After an operation ended: over to the next number; a closing model with nothing left ends."""
    order.move_on(session, model)
    if model.state != "closing":
        return
    left = select(OperationRow.seq).where(OperationRow.model_id == model.model_id, OperationRow.done_at.is_(None))
    if session.scalars(left.where(OperationRow.kind != "unload_model").limit(1)).first() is not None:
        return
    run = runs.find(session, model.run_id)
    if run is not None:
        runs.end(session, run, "completed", "unloaded", rules.bases, now)


def show(session: Session, model_id: str, tenant: str | None) -> ModelView:
    return view(find(session, model_id, tenant))


def view(row: ModelRow) -> ModelView:
    return ModelView(
        model_id=row.model_id,
        session_id=row.session_id or "",
        tenant=row.tenant,
        run_id=row.run_id,
        policy=row.policy,
        base=row.base,
        lora=Lora.model_validate(row.lora),
        train_unembed=row.train_unembed,
        state="active" if row.state == "active" else "unloaded",
        step=row.state_step,
        last_seq_id=row.last_seq,
        created_at=row.created_at,
        last_request_at=row.last_request_at,
        user_metadata=row.user_metadata,
    )


def list_models(session: Session, tenant: str | None, limit: int, offset: int) -> ModelPage:
    """Newest first."""
    query, count = select(ModelRow), select(func.count()).select_from(ModelRow)
    if tenant is not None:
        query, count = query.where(ModelRow.tenant == tenant), count.where(ModelRow.tenant == tenant)
    rows = session.scalars(query.order_by(ModelRow.seq.desc()).limit(limit).offset(offset))
    return ModelPage(items=[view(row) for row in rows], total=session.scalar(count) or 0)
