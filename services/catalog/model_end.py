"""The end of a model, in the transaction that ends its run, whoever ended it.

Invariant: no operation of a model outlives its run.
"""

from __future__ import annotations

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from services.catalog import file_uses, outcomes
from services.catalog.operation_tables import ModelRow, OperationRow

__all__ = ["TINKER", "close", "start_use"]

TINKER = "tinker"
"""The method of a run whose steps a client commands."""


def start_use(model_id: str) -> str:
    """As whom a model uses the files that it starts from."""
    return f"model:{model_id}"


def close(session: Session, run_id: str, outcome: str, now: float) -> None:
    """No-op for a run that is no model's, or was closed before."""
    model = session.scalars(select(ModelRow).where(ModelRow.run_id == run_id)).one_or_none()
    if model is None or model.state == "unloaded":
        return
    model.state = "unloaded"
    unfinished = select(OperationRow).where(OperationRow.model_id == model.model_id, OperationRow.done_at.is_(None))
    for row in session.scalars(unfinished).all():
        if row.kind == "unload_model":
            outcomes.finish(session, row, outcomes.saved(), now)
        else:
            message = f"operation {row.seq_id} was not finished before its model ended: {outcome}"
            outcomes.fail(session, row, message, "user", now)
    added = update(OperationRow).where(OperationRow.model_id == model.model_id, OperationRow.in_state.is_(True))
    session.execute(added.values(in_state=False))
    file_uses.drop(session, start_use(model.model_id))
