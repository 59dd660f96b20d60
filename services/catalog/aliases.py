"""Aliases: names that point at revisions, moved by compare-and-set only, each move in the audit trail.

Invariant: an alias's version grows by one with each move, so that 1 → 2 → 1 → 2 is three facts. Whether
the target is ready is asked before (moves.py, plan.py); here is only the transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from mint_schemas.events import AliasMoved
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import emit
from services.catalog.lineage import find_revision
from services.catalog.tables import AliasMoveRow, AliasRow, PolicyRow, RunRow
from shared.errors import Refused


@dataclass(frozen=True)
class Move:
    """`expected_version`: the version that must hold (0 = no alias yet); None = whatever holds."""

    policy: str
    alias: str
    revision: str
    actor: str
    reason: str
    expected_version: int | None = None


def move(session: Session, wanted: Move, token: str, now: float, run: RunRow | None = None) -> AliasRow:
    """To the revision that it points at already: no move. Raises Refused (409) if the version moved on."""
    row = session.get(AliasRow, (wanted.policy, wanted.alias), with_for_update=True)
    version = row.version if row else 0
    if wanted.expected_version is not None and wanted.expected_version != version:
        refuse_version(session, wanted, version)
    if row is not None and row.revision == wanted.revision:
        return row
    previous = row.revision if row else None
    if row is None:
        row = AliasRow(policy=wanted.policy, alias=wanted.alias, revision=wanted.revision, version=0, previous=None)
        session.add(row)
    row.previous, row.revision, row.version = previous, wanted.revision, version + 1
    policy = session.get(PolicyRow, wanted.policy)
    row.base = policy.base if policy else ""
    session.flush()
    row.moved = _record(session, wanted, row, token, now, run)
    session.flush()
    return row


def refuse_version(session: Session, wanted: Move, version: int) -> NoReturn:
    raise Refused(
        f"alias {wanted.policy}:{wanted.alias} is at version {version}, not {wanted.expected_version}: "
        f"moved by {last_mover(session, wanted.policy, wanted.alias)}; look again and decide anew",
        code="alias_moved",
        status=409,
    )


def _record(session: Session, wanted: Move, row: AliasRow, token: str, now: float, run: RunRow | None) -> int:
    """The move's place in the audit trail."""
    moved = AliasMoveRow(
        policy=row.policy,
        alias=row.alias,
        version=row.version,
        revision=row.revision,
        previous=row.previous,
        reason=wanted.reason,
        actor=wanted.actor,
        run_id=run.run_id if run else None,
        at=now,
    )
    session.add(moved)
    session.flush()
    body = AliasMoved(
        policy=row.policy,
        base=row.base,
        alias=row.alias,
        version=row.version,
        revision=row.revision,
        previous=row.previous,
        reason=wanted.reason,
        actor=wanted.actor,
        run_id=run.run_id if run else None,
    )
    fact_id = f"{row.policy}:{row.alias}:{row.version}"
    if run is not None:
        emit.fact(session, run, "mint.v1.alias.moved", fact_id, body, now)
    else:
        emit.message(session, "mint.v1.alias.moved", fact_id, token, body.model_dump(mode="json"), now, row.policy)
    return moved.seq


def last_mover(session: Session, policy: str, alias: str) -> str:
    """Who moved it last and where to, in words."""
    query = select(AliasMoveRow).where(AliasMoveRow.policy == policy, AliasMoveRow.alias == alias)
    row = session.scalars(query.order_by(AliasMoveRow.version.desc()).limit(1)).first()
    if row is None:
        return "nobody"
    return f"{row.actor} ({row.reason} to {row.revision}, version {row.version})"


def rollback_target(session: Session, policy: str, alias: str, to: str | None) -> tuple[str, int]:
    """(revision to go back to, version that holds now). Raises Refused naming what exists."""
    row = session.get(AliasRow, (policy, alias))
    if row is None:
        raise Refused(f"{policy} has no alias {alias!r}; {_has(session, policy)}", code="not_found", status=404)
    target = to or row.previous
    if target is None:
        raise Refused(
            f"{policy}:{alias} has pointed at {row.revision} only; there is nothing to roll back to",
            code="no_previous",
            status=409,
        )
    check_target(session, policy, target)
    return target, row.version


def check_target(session: Session, policy: str, revision: str) -> None:
    """An alias points at a revision of its own policy. Raises Refused."""
    row = find_revision(session, revision)
    if row is None or row.policy != policy:
        raise Refused(
            f"{revision} is no revision of {policy}; `mint revisions {policy}` lists them", code="not_found", status=404
        )
    if row.ephemeral:
        raise Refused(
            f"{revision} is ephemeral: it expires, and no alias may point at it; save the weights under a name",
            code="ephemeral",
            status=409,
        )


def _has(session: Session, policy: str) -> str:
    names = session.scalars(select(AliasRow.alias).where(AliasRow.policy == policy).order_by(AliasRow.alias)).all()
    return f"it has {', '.join(names)}" if names else "it has none yet"
