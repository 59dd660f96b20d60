"""Pinned policies: what their aliases point at is resident on every replica of their base, and stays.

Invariant: the pinned policies of a base are few, of all tenants together and of each, and each brings few
revisions, since every one takes a place from everybody else's.
"""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from services.catalog import views
from services.catalog.tables import AliasRow, PolicyRow
from shared.catalog.api import PolicyView
from shared.errors import Refused

MOST_OF_A_BASE = 256
MOST_OF_A_TENANT = 16
ALIASES_OF_A_POLICY = 4


def pin(session: Session, name: str, pinned: bool, most_of_a_tenant: int = MOST_OF_A_TENANT) -> PolicyView:
    """Raises Refused: 404 for an unknown policy, 409 when its tenant or its base has as many as it may."""
    row = session.get(PolicyRow, name)
    if row is None:
        raise Refused(f"there is no policy {name[:130]}; `mint policies` lists them", code="not_found", status=404)
    if pinned and not row.pinned:
        _check_room(session, row, most_of_a_tenant)
    row.pinned = pinned
    session.flush()
    return views.policy_view(session, row)


def _check_room(session: Session, row: PolicyRow, most_of_a_tenant: int) -> None:
    of_base = select(func.count()).select_from(PolicyRow).where(PolicyRow.pinned, PolicyRow.base == row.base)
    if (session.scalar(of_base.where(PolicyRow.tenant == row.tenant)) or 0) >= most_of_a_tenant:
        message = (
            f"{row.tenant} has pinned {most_of_a_tenant} policies of {row.base}, as many as it may; unpin one first"
        )
        raise Refused(message, "too_many_pins", status=409)
    if (session.scalar(of_base) or 0) >= MOST_OF_A_BASE:
        message = f"{MOST_OF_A_BASE} policies of {row.base} are pinned already; unpin one first"
        raise Refused(message, "too_many_pins", status=409)


def pinned_revisions(session: Session, base: str) -> set[str]:
    """What the `ALIASES_OF_A_POLICY` last-moved aliases of each pinned policy point at, `MOST_OF_A_BASE` in all:
    every policy gets one before any gets two."""
    place = func.row_number().over(partition_by=AliasRow.policy, order_by=(AliasRow.moved.desc(), AliasRow.alias))
    aliases = (
        select(AliasRow.revision, AliasRow.moved, place.label("place"))
        .join(PolicyRow, PolicyRow.policy == AliasRow.policy)
        .where(PolicyRow.pinned, PolicyRow.base == base)
        .subquery()
    )
    query = select(aliases.c.revision).where(aliases.c.place <= ALIASES_OF_A_POLICY)
    return set(session.scalars(query.order_by(aliases.c.place, aliases.c.moved.desc()).limit(MOST_OF_A_BASE)))
