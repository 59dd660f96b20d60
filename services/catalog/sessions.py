"""Sessions: what a client has open. Its heartbeats and requests renew it; silent for too long, it is over.

Invariant: a session that is over accepts nothing, and its models are on their way out; what it leaves behind of
ephemeral revisions lives for the grace alone.
"""

from __future__ import annotations

import re
import uuid

from mint_schemas.names import NAME
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from services.catalog import ephemeral
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import ModelRow, SamplerRow, SessionRow
from services.catalog.validate import name_errors
from shared.catalog.operations import FinishSession, NewSession, SessionHead, SessionPage, SessionView
from shared.errors import Refused

__all__ = [
    "find",
    "finish",
    "heartbeat",
    "list_sessions",
    "models_of",
    "new_session",
    "show",
    "silent",
    "touch",
    "view",
]

_NAME = re.compile(NAME)


def new_session(session: Session, request: NewSession, rules: OperationRules, now: float) -> SessionView:
    """Raises Refused (400) for a tenant that cannot have policies."""
    if not _NAME.fullmatch(request.tenant):
        raise Refused(f"{request.tenant[:80]!r} is no tenant: 1 to 63 of a-z, 0-9, '.', '_' and '-'")
    errors = name_errors({"policy": f"{request.tenant}/tinker"}, rules.bases)
    if errors:
        raise Refused("; ".join(errors))
    row = SessionRow(
        session_id=str(uuid.uuid4()),
        tenant=request.tenant,
        state="open",
        sdk_version=request.sdk_version[:200],
        tags=list(request.tags),
        user_metadata=dict(request.user_metadata),
        created_at=now,
        seen_at=now,
        reason="",
    )
    session.add(row)
    session.flush()
    return view(session, row)


def find(session: Session, session_id: str, tenant: str | None, lock: bool = False) -> SessionRow:
    """`lock`: so that it does not end meanwhile. Raises Refused (404), also for another tenant's."""
    query = select(SessionRow).where(SessionRow.session_id == session_id)
    row = session.scalars(query.with_for_update(key_share=True) if lock else query).one_or_none()
    if row is None or (tenant is not None and row.tenant != tenant):
        raise Refused(f"there is no session {session_id[:64]}", code="not_found", status=404)
    return row


def touch(row: SessionRow, now: float) -> None:
    """A sign of life. Raises Refused (410) for a session that is over."""
    if row.state != "open":
        message = f"session {row.session_id} is {row.state}{f': {row.reason}' if row.reason else ''}; open another"
        raise Refused(message, code="session_ended", status=410)
    row.seen_at = max(row.seen_at, now)


def heartbeat(session: Session, session_id: str, tenant: str | None, now: float) -> SessionHead:
    row = find(session, session_id, tenant, lock=True)
    touch(row, now)
    return head(row)


def finish(session: Session, session_id: str, request: FinishSession, rules: OperationRules, now: float) -> SessionRow:
    """Again: nothing changes. Its models are unloaded by whoever calls this."""
    row = find(session, session_id, request.tenant, lock=True)
    if row.state == "open":
        _end(session, row, "finished", request.reason, rules, now)
    return row


def silent(session: Session, rules: OperationRules, since: float, now: float) -> list[SessionRow]:
    """Those that are over now, being silent for too long. `since`: when anybody could last be heard from on; the time
    before it, when the catalog itself was away, does not count."""
    if now - since < rules.session_ttl_s:
        return []
    query = select(SessionRow).where(SessionRow.state == "open", SessionRow.seen_at < now - rules.session_ttl_s)
    rows = list(session.scalars(query.with_for_update(skip_locked=True, key_share=True)))
    for row in rows:
        _end(session, row, "expired", f"no heartbeat for {rules.session_ttl_s:g} s", rules, now)
    return rows


def _end(session: Session, row: SessionRow, state: str, reason: str, rules: OperationRules, now: float) -> None:
    row.state, row.ended_at, row.reason = state, now, reason[:1000]
    session.flush()
    ephemeral.session_ended(session, row.session_id, rules, now)


def models_of(session: Session, session_id: str) -> list[ModelRow]:
    return list(session.scalars(select(ModelRow).where(ModelRow.session_id == session_id).order_by(ModelRow.seq)))


def show(session: Session, session_id: str, tenant: str | None) -> SessionView:
    return view(session, find(session, session_id, tenant))


def view(session: Session, row: SessionRow) -> SessionView:
    models = select(ModelRow.model_id).where(ModelRow.session_id == row.session_id).order_by(ModelRow.seq)
    samplers = select(SamplerRow.sampler_id).where(SamplerRow.session_id == row.session_id)
    return SessionView(
        **dict(head(row)),
        model_ids=tuple(session.scalars(models)),
        sampler_ids=tuple(session.scalars(samplers.order_by(SamplerRow.sampling_session_seq_id))),
    )


def head(row: SessionRow) -> SessionHead:
    return SessionHead.model_validate(
        {
            "session_id": row.session_id,
            "tenant": row.tenant,
            "state": row.state,
            "created_at": row.created_at,
            "seen_at": row.seen_at,
            "sdk_version": row.sdk_version,
            "tags": row.tags,
            "user_metadata": row.user_metadata,
        }
    )


def list_sessions(session: Session, tenant: str | None, limit: int, offset: int) -> SessionPage:
    """Newest first."""
    query, count = select(SessionRow), select(func.count()).select_from(SessionRow)
    if tenant is not None:
        query, count = query.where(SessionRow.tenant == tenant), count.where(SessionRow.tenant == tenant)
    rows = session.scalars(query.order_by(SessionRow.seq.desc()).limit(limit).offset(offset)).all()
    return SessionPage(items=[head(row) for row in rows], total=session.scalar(count) or 0)
