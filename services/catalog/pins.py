"""Pinned policies: what their aliases point at is resident on every replica of their base, and stays.

Invariant: the pinned policies of a base are few, since each takes a place from everybody else's.
"""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from services.catalog import views
from services.catalog.tables import AliasRow, PolicyRow, RevisionRow
from shared.catalog.api import PolicyView
from shared.errors import Refused

MOST_OF_A_BASE = 256


def pin(session: Session, name: str, pinned: bool) -> PolicyView:
    """Raises Refused: 404 for an unknown policy, 409 when the base has as many as it may."""
    row = session.get(PolicyRow, name)
    if row is None:
        raise Refused(f"there is no policy {name[:130]}; `mint policies` lists them", code="not_found", status=404)
    if pinned and not row.pinned:
        query = select(func.count()).select_from(PolicyRow).where(PolicyRow.pinned, PolicyRow.base == row.base)
        if (session.scalar(query) or 0) >= MOST_OF_A_BASE:
            message = f"{MOST_OF_A_BASE} policies of {row.base} are pinned already; unpin one first"
            raise Refused(message, "too_many_pins", status=409)
    row.pinned = pinned
    session.flush()
    return views.policy_view(session, row)


def pinned_revisions(session: Session, base: str) -> set[str]:
    query = select(AliasRow.revision).join(PolicyRow, PolicyRow.policy == AliasRow.policy)
    query = query.join(RevisionRow, RevisionRow.revision == AliasRow.revision)
    return set(session.scalars(query.where(PolicyRow.pinned, RevisionRow.base == base)))
