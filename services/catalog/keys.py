"""API keys: made, listed, revoked, recognised by their sha256.

Invariants: a row is never deleted and a revocation never taken back, so that the audit trail can name every key that
ever acted; the text of a key is never here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mint_schemas.names import NAME
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog.clock import iso, iso_or_none
from services.catalog.cursors import page
from services.catalog.tables import KeyRow
from services.catalog.validate import name_errors
from shared.bases import Base
from shared.catalog.api import Page
from shared.catalog.keys import KeyView, NewKey, key_id_of
from shared.errors import Refused

__all__ = ["create", "list_keys", "revoke", "verify"]


def create(session: Session, request: NewKey, bases: Mapping[str, Base], now: float) -> KeyView:
    """The same sha256 again: the row that exists, so that a lost answer may be asked for again. Raises Refused (400)
    for what is no tenant, and (409) where the key is another tenant's."""
    _check_tenant(request.tenant, bases)
    row = session.scalars(select(KeyRow).where(KeyRow.sha256 == request.sha256)).one_or_none()
    if row is None:
        row = KeyRow(
            key_id=key_id_of(request.sha256),
            sha256=request.sha256,
            tenant=request.tenant,
            label=request.label,
            kind=request.kind,
            created_at=now,
            created_by=request.actor,
        )
        session.add(row)
        session.flush()
    if row.tenant != request.tenant:
        raise Refused("this key exists already, for another tenant; make a new one", code="key_exists", status=409)
    return _view(row)


def verify(session: Session, sha256: str) -> KeyView:
    """Raises Refused (404) for an unknown key."""
    row = session.scalars(select(KeyRow).where(KeyRow.sha256 == sha256)).one_or_none()
    if row is None:
        raise Refused("there is no such key", code="not_found", status=404)
    return _view(row)


def list_keys(session: Session, tenant: str | None, limit: int, cursor: str | None) -> Page[KeyView]:
    """Newest first, revoked ones too."""
    query = select(KeyRow)
    if tenant is not None:
        query = query.where(KeyRow.tenant == tenant)
    return page(session, query, KeyRow.seq, limit, cursor, _view)


def revoke(session: Session, key_id: str, actor: str, now: float) -> KeyView:
    """The first revocation stands. Raises Refused (404)."""
    row = session.scalars(select(KeyRow).where(KeyRow.key_id == key_id)).one_or_none()
    if row is None:
        raise Refused(f"there is no key {key_id[:80]!r}; `mint key list` lists them", code="not_found", status=404)
    if row.revoked_at is None:
        row.revoked_at, row.revoked_by = now, actor
    return _view(row)


def _check_tenant(tenant: str, bases: Mapping[str, Base]) -> None:
    if not re.fullmatch(NAME, tenant):
        raise Refused(
            f"tenant {tenant[:80]!r} is no name: 1 to 63 of a-z, 0-9, '.', '_' and '-', a letter or digit first",
            code="invalid_name",
        )
    errors = name_errors({"policy": f"{tenant}/x"}, bases)
    if errors:
        raise Refused("; ".join(error.removeprefix("policy: ") for error in errors), code="invalid_name")


def _view(row: KeyRow) -> KeyView:
    return KeyView.model_validate(
        {
            "key_id": row.key_id,
            "tenant": row.tenant,
            "label": row.label,
            "kind": row.kind,
            "created_at": iso(row.created_at),
            "created_by": row.created_by,
            "revoked_at": iso_or_none(row.revoked_at),
            "revoked_by": row.revoked_by,
        }
    )
