"""The order of a model's operations: strictly by number, whatever the order of arrival; what has no number of its own
comes behind the highest that was accepted before it.

Invariant: an operation is worked on when every number below it is through; a number that does not come is waited for,
then everything behind it fails.
"""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session, defer

from services.catalog import outcomes
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import ModelRow, OperationRow

__all__ = [
    "ACCUMULATING",
    "fail_behind_gap",
    "in_state",
    "move_on",
    "names_in_state",
    "open_count",
    "pending",
    "ready",
]

ACCUMULATING = ("forward_backward", "reverse_kl")
"""What adds to the gradients of a model."""


def pending(session: Session, model: ModelRow, limit: int | None = None) -> list[OperationRow]:
    """What no worker is through with, in order, whether or not something before it is missing."""
    query = select(OperationRow).where(OperationRow.model_id == model.model_id, OperationRow.done_at.is_(None))
    query = query.where(OperationRow.worked_at.is_(None))
    return list(session.scalars(query.order_by(OperationRow.seq_id, OperationRow.place).limit(limit)))


def open_count(session: Session, model: ModelRow) -> int:
    """How many are not over."""
    query = select(func.count()).select_from(OperationRow).where(OperationRow.model_id == model.model_id)
    return session.scalar(query.where(OperationRow.done_at.is_(None))) or 0


def ready(session: Session, model: ModelRow, limit: int) -> list[OperationRow]:
    """What may be worked on now, in order; unloading is the catalog's own."""
    found: list[OperationRow] = []
    expected = model.next_seq
    for row in pending(session, model, limit):
        if _behind_gap(row, expected) or row.kind == "unload_model":
            break
        found.append(row)
        expected = max(expected, row.seq_id + 1)
    return found


def _behind_gap(row: OperationRow, expected: int) -> bool:
    return row.seq_id > expected or (row.place > 0 and row.seq_id >= expected)


def names_in_state(session: Session, model: ModelRow) -> list[str]:
    """The ids of those whose gradients belong to the state of the model, in order."""
    query = select(OperationRow.request_id).where(OperationRow.model_id == model.model_id)
    query = query.where(OperationRow.in_state.is_(True))
    return list(session.scalars(query.order_by(OperationRow.seq_id, OperationRow.place)))


def in_state(session: Session, model: ModelRow, whole: bool = True) -> list[OperationRow]:
    """They themselves. `whole`: with their payloads; a client that steps seldom has many of them."""
    query = select(OperationRow).where(OperationRow.model_id == model.model_id, OperationRow.in_state.is_(True))
    left_out = [defer(OperationRow.result), *([] if whole else [defer(OperationRow.payload)])]
    return list(session.scalars(query.options(*left_out).order_by(OperationRow.seq_id, OperationRow.place)))


def move_on(session: Session, model: ModelRow) -> None:
    """Over the numbers that are through."""
    session.flush()
    while True:
        query = select(OperationRow.worked_at).where(
            OperationRow.model_id == model.model_id, OperationRow.seq_id == model.next_seq, OperationRow.place == 0
        )
        if session.scalars(query).one_or_none() is None:
            return
        model.next_seq += 1


def fail_behind_gap(session: Session, model: ModelRow, rules: OperationRules, since: float, now: float) -> bool:
    """True if a number was waited for too long, and what is behind it has failed. `since`: when it could last have been
    sent from on; the time before it, when the catalog itself was away, does not count."""
    first = pending(session, model, 1)
    if not first or not _behind_gap(first[0], model.next_seq):
        return False
    session.refresh(model, with_for_update=True)  # at another catalog the number may be coming just now
    rows = [row for row in pending(session, model) if row.kind != "unload_model"]
    if not rows or not _behind_gap(rows[0], model.next_seq):
        return False
    if now - max(since, min(row.accepted_at for row in rows)) < rules.operation_gap_s:
        return False
    for row in rows:
        message = (
            f"operation {row.seq_id} waits for {model.next_seq}, which never came (within {rules.operation_gap_s:g} s);"
            " send operations without gaps in seq_id"
        )
        outcomes.fail(session, row, message, "user", now)
    model.next_seq = max(row.seq_id for row in rows) + 1
    move_on(session, model)
    return True
