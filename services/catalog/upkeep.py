"""The periodic look at sessions, operations and paths: what time itself brings about.

In: nothing but the clock. Out: transactions, each small. Invariant: each may run at any time and any number of times; a
lost one costs at most the period.
"""

from __future__ import annotations

from sqlalchemy import delete, or_, select
from sqlalchemy.orm import Session

from services.catalog import ephemeral, file_uses, models, order, outcomes, path_changes, sessions, signals
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import ModelRow, OperationRow

__all__ = ["BATCH", "CHORES", "ROUNDS", "end_silent", "expire_results", "fail_gaps", "remove_expired", "resend"]

BATCH = 500
ROUNDS = 20
"""How often a chore is done again at one look, while it finds a batch."""
KEEP_S = 7 * 86400.0
"""How long it is known of an expired operation that it was."""


def end_silent(session: Session, rules: OperationRules, since: float, now: float) -> list[str]:
    """Sessions that nobody renews. `since`: when the catalog began to listen."""
    over = sessions.silent(session, rules, since, now)
    for row in over:
        models.unload_all(session, row.session_id, rules, now)
    return [row.session_id for row in over]


def fail_gaps(session: Session, rules: OperationRules, since: float, now: float) -> list[str]:
    """Operations behind a number that never came."""
    failed = []
    for model in _waiting(session):
        if order.fail_behind_gap(session, model, rules, since, now):
            models.settle(session, model, rules, now)
            failed.append(model.model_id)
    return failed


def resend(session: Session, rules: OperationRules, since: float, now: float) -> list[str]:
    """Messages for work that waits in silence."""
    told = [model.policy for model in _waiting(session) if signals.operations_wait(session, model, rules, now)]
    return told + signals.resend_samples(session, rules, now)


def _waiting(session: Session) -> list[ModelRow]:
    ids = select(OperationRow.model_id).where(OperationRow.state.in_(("queued", "running")))
    unworked = ids.where(OperationRow.worked_at.is_(None), OperationRow.model_id.is_not(None)).distinct()
    return list(session.scalars(select(ModelRow).where(ModelRow.model_id.in_(unworked)).order_by(ModelRow.seq)))


def remove_expired(session: Session, rules: OperationRules, since: float, now: float) -> list[str]:
    """Paths past their time, and ephemeral revisions."""
    path_changes.remove_expired(session, rules, now)
    return ephemeral.sweep(session, now)


def expire_results(session: Session, rules: OperationRules, since: float, now: float) -> list[str]:
    """Results are kept for their time; payloads as long, and for as long as a state is made from them."""
    query = select(OperationRow).where(
        OperationRow.expired.is_(False),
        OperationRow.done_at < now - rules.result_ttl_s,
        OperationRow.in_state.is_(False),
    )
    rows = session.scalars(query.order_by(OperationRow.done_at).limit(BATCH)).all()
    for row in rows:
        row.expired, row.result, row.payload = True, None, None
        file_uses.drop(session, outcomes.use_of(row))
    _forget(session, now - rules.result_ttl_s - KEEP_S)
    return [row.request_id for row in rows]


def _forget(session: Session, before: float) -> None:
    """Samples, and the operations of models that are unloaded. An import stays, since its name does."""
    unloaded = select(ModelRow.model_id).where(ModelRow.state == "unloaded")
    gone = delete(OperationRow).where(OperationRow.expired.is_(True), OperationRow.done_at < before)
    over = or_(OperationRow.kind == "sample", OperationRow.model_id.in_(unloaded))
    session.execute(gone.where(over, OperationRow.kind.not_in(("import", "interpolate"))))


CHORES = (end_silent, fail_gaps, resend, remove_expired, expire_results)
