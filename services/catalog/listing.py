"""Pages of the policies by name: of all tenants or of one, perhaps only those that have an alias.

Invariant: what a page reads grows with the page, not with the catalog and not with the names before it or
without the alias. Names compare byte by byte, as SQLite does, so that a tenant's are one range.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import InstrumentedAttribute, Session

from services.catalog import views
from services.catalog.cursors import page
from services.catalog.tables import AliasRow, PolicyRow
from shared.catalog.api import Page, PolicyView

__all__ = ["list_policies"]

AFTER_SLASH = chr(ord("/") + 1)


def list_policies(
    session: Session,
    tenant: str | None,
    limit: int,
    cursor: str | None,
    alias: str | None = None,
    after: str | None = None,
) -> Page[PolicyView]:
    """In order of their names, those that sort behind `after`. Raises Refused for a cursor that is none."""
    key: InstrumentedAttribute[str] = PolicyRow.policy
    query = select(PolicyRow)
    if alias is not None:
        # Walks the alias's own index, in which what lacks the alias does not stand.
        key = AliasRow.policy
        query = select(PolicyRow).join(AliasRow, AliasRow.policy == PolicyRow.policy).where(AliasRow.alias == alias)
    start = after
    if tenant is not None:
        start = max(after or "", f"{tenant}/")
        query = query.where(key < f"{tenant}{AFTER_SLASH}")
    return page(session, query, key, limit, cursor, lambda row: views.policy_view(session, row), False, start)
