"""What a reference means now. Base names are matched first and exactly; then the reference grammar.

Invariant: an unknown name is an error with near matches, never the base model's answer.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from mint_schemas.names import Reference, parse_reference
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from services.catalog.lineage import find_revision
from services.catalog.tables import AliasRow, PolicyRow, RevisionRow
from shared.bases import Base
from shared.catalog.api import ResolvedRevision
from shared.errors import Refused

NEAR = 5


def resolve(session: Session, text: str, bases: Mapping[str, Base]) -> ResolvedRevision:
    """Raises Refused (404): `unknown_reference`, `unknown_alias` or `unknown_revision`."""
    if text in bases:
        return ResolvedRevision(
            reference=text, base=text, revision=None, adapter_sha256=None, policy=None, alias=None, alias_version=None
        )
    try:
        named = parse_reference(text)
    except ValueError as error:
        raise Refused(str(error), "unknown_reference", _near(session, text, bases), 404) from None
    if session.get(PolicyRow, named.policy_name) is None:
        raise Refused(f"there is no policy {named.policy_name}", "unknown_reference", _near(session, text, bases), 404)
    return _numbered(session, named) if named.number is not None else _aliased(session, named)


def _numbered(session: Session, named: Reference) -> ResolvedRevision:
    row = find_revision(session, str(named))
    if row is None:
        latest = session.scalar(select(func.max(RevisionRow.number)).where(RevisionRow.policy == named.policy_name))
        has = f"its latest is {named.policy_name}@{latest}" if latest else "it has no revision yet"
        near = [f"{named.policy_name}@{latest}"] if latest else []
        raise Refused(f"{named.policy_name} has no revision {named.number}; {has}", "unknown_revision", near, 404)
    return _found(named, row, None)


def _aliased(session: Session, named: Reference) -> ResolvedRevision:
    alias = session.get(AliasRow, (named.policy_name, named.alias or "live"))
    row = find_revision(session, alias.revision) if alias else None
    if alias is None or row is None:
        held = session.execute(
            select(AliasRow.alias, AliasRow.revision)
            .where(AliasRow.policy == named.policy_name)
            .order_by(AliasRow.alias)
        ).all()
        has = ", ".join(f"{name} → {revision}" for name, revision in held) or "none"
        near = [f"{named.policy_name}:{name}" for name, _ in held]
        raise Refused(
            f"{named.policy_name} has no alias {named.alias or 'live'!r}; its aliases: {has}",
            "unknown_alias",
            near,
            404,
        )
    return _found(named, row, alias)


def _found(named: Reference, row: RevisionRow, alias: AliasRow | None) -> ResolvedRevision:
    return ResolvedRevision(
        reference=str(named),
        base=row.base,
        revision=row.revision,
        adapter_sha256=row.adapter_sha256,
        policy=row.policy,
        alias=alias.alias if alias else None,
        alias_version=alias.version if alias else None,
    )


def _near(session: Session, text: str, bases: Mapping[str, Base]) -> list[str]:
    names = [*bases, *session.scalars(select(PolicyRow.policy))]
    lowered = {name.lower(): name for name in names}
    return [lowered[name] for name in difflib.get_close_matches(text.lower()[:200], lowered, NEAR, 0.6)]
