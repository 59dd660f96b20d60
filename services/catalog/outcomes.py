"""The end of an operation: its result or its failure, and what the catalog itself answers for saves and loads.

Invariant: an end is final, whoever waits for it is told behind the commit, and the ends of one sampler's samples have
an order.
"""

from __future__ import annotations

import base64

from sqlalchemy.orm import Session

from services.catalog import file_uses, notices
from services.catalog.operation_tables import OperationRow, SamplerRow
from services.catalog.tables import LeaseRow
from shared.catalog.operations import Category, Content, Failure, OperationView
from shared.errors import Refused
from shared.operations.payload import SavedResult, encode

__all__ = ["CAPACITY_S", "check_number", "fail", "finish", "saved", "use_of", "view"]

CAPACITY_S = 30.0
"""What waits longer for a worker is said to wait for capacity."""
MAX_MESSAGE = 4000
MAX_NUMBER = 2**62


def saved(path: str = "", sampling_session_id: str = "", note: str = "") -> Content:
    result = SavedResult(path=path, sampling_session_id=sampling_session_id, note=note)
    return Content(inline=base64.b64encode(encode(result)))  # the field decodes what it is given


def check_number(what: str, number: int, least: int = 0, most: int = MAX_NUMBER) -> None:
    """A client's own number. Raises Refused (400)."""
    if not least <= number <= most:
        raise Refused(f"{what} {number} is not allowed; it is {least} to {most}")


def use_of(row: OperationRow) -> str:
    """As whom an operation uses files."""
    return f"operation:{row.request_id}"


def finish(session: Session, row: OperationRow, result: Content, now: float) -> None:
    row.state, row.result = "done", result.model_dump(mode="json")
    if result.file is not None:
        file_uses.use(session, use_of(row), [result.file])
    _over(session, row, now)


def fail(session: Session, row: OperationRow, message: str, category: Category, now: float) -> None:
    """No-op for one that is over."""
    if row.done_at is not None:
        return
    row.state = "failed"
    row.failure = Failure(message=message[:MAX_MESSAGE], category=category).model_dump(mode="json")
    _over(session, row, now)


def _over(session: Session, row: OperationRow, now: float) -> None:
    row.done_at = now
    row.worked_at = row.worked_at if row.worked_at is not None else now
    if row.kind == "sample":
        lease = session.get(LeaseRow, f"operation:{row.request_id}")
        if lease is not None:
            session.delete(lease)
    if row.sampler_id is not None:
        _count(session, row, row.sampler_id)
        notices.ended(session, row.sampler_id)
    session.flush()
    notices.ended(session, row.request_id)


def _count(session: Session, row: OperationRow, sampler_id: str) -> None:
    """Under the sampler's lock, so that whoever has seen a number has seen all below it."""
    sampler = session.get_one(SamplerRow, sampler_id, with_for_update=True)
    sampler.ended += 1
    row.ended = sampler.ended


def view(row: OperationRow, now: float) -> OperationView:
    waits = row.state == "queued" and now - row.accepted_at > CAPACITY_S
    return OperationView.model_validate(
        {
            "request_id": row.request_id,
            "kind": row.kind,
            "state": row.state,
            "model_id": row.model_id,
            "seq_id": row.seq_id,
            "result": row.result,
            "failure": row.failure,
            "queue": "paused_capacity" if waits else "active",
            "expired": row.expired,
        }
    )
