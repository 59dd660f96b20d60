"""Telling a learner that operations of a policy wait, and a rollout worker that a sample does.

Out: messages in the outbox. Invariant: while work waits and nobody holds its lease, a message for it is under way or
comes with a look; a working learner is not told again.
"""

from __future__ import annotations

from mint_schemas.commands import OperationsRequested, SampleRequested
from sqlalchemy import select
from sqlalchemy.orm import Session, defer

from services.catalog import emit, order, outcomes
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import ModelRow, OperationRow
from services.catalog.tables import LeaseRow

__all__ = ["operations_wait", "resend_samples", "sample_resource", "sample_waits", "writer"]

MAX_DOUBLINGS = 5


def writer(policy: str) -> str:
    """The resource whose holder writes to a policy, with commands or with operations."""
    return f"policy:{policy}"


def sample_resource(request_id: str) -> str:
    return f"operation:{request_id}"


def operations_wait(session: Session, model: ModelRow, rules: OperationRules, now: float) -> bool:
    """True if a message is written now."""
    base = rules.bases.get(model.base)
    if base is None or _is_leased(session, writer(model.policy), now) or not order.ready(session, model, 1):
        return False
    patience = rules.resend_s * 2 ** min(model.signals, MAX_DOUBLINGS)
    if model.signalled_at is not None and now - model.signalled_at < patience:
        return False
    again = model.signalled_seq == model.last_seq
    model.signals = model.signals + 1 if again else 0
    model.signalled_seq, model.signalled_at = model.last_seq, now
    emit.message(
        session,
        "mint.v1.operations.requested",
        f"{model.policy}:{model.last_seq}",
        base.token,
        OperationsRequested(policy=model.policy, base=model.base).model_dump(mode="json"),
        now,
        subject=model.policy,
        replay=model.signals if again else None,
    )
    return True


def sample_waits(
    session: Session, row: OperationRow, rules: OperationRules, now: float, replay: int | None = None
) -> None:
    base = rules.bases[row.details["base"]]
    body = SampleRequested(request_id=row.request_id, base=base.name).model_dump(mode="json")
    emit.message(session, "mint.v1.sample.requested", row.request_id, base.token, body, now, replay=replay)


def resend_samples(session: Session, rules: OperationRules, now: float) -> list[str]:
    """Those that are silent for too long; those whose base is gone fail. Returns the ids of the former."""
    query = select(OperationRow).where(
        OperationRow.kind == "sample",
        OperationRow.state.in_(("queued", "running")),
        OperationRow.accepted_at < now - rules.deadline_s,
    )
    sent = []
    for row in session.scalars(query.options(defer(OperationRow.payload))).all():
        if row.details["base"] not in rules.bases:
            message = f"base model {row.details['base']} is not configured any more; nobody can sample from it"
            outcomes.fail(session, row, message, "server", now)
            continue
        patience = rules.deadline_s * (
            2 ** min(row.issues, MAX_DOUBLINGS) - 1 + max(0, row.issues - MAX_DOUBLINGS) * 32
        )
        if now - row.accepted_at >= patience and not _is_leased(session, sample_resource(row.request_id), now):
            sample_waits(session, row, rules, now, replay=row.issues)
            row.issues += 1
            sent.append(row.request_id)
    return sent


def _is_leased(session: Session, resource: str, now: float) -> bool:
    lease = session.get(LeaseRow, resource)
    return lease is not None and lease.expires_at > now
