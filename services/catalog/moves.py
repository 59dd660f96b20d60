"""Moving an alias by hand, and rolling it back: prewarm the target, wait until it is ready, then move.

Invariant: an alias never moves to a revision that fewer than `min_ready` replicas have ready, unless that is forced,
which the audit trail then says; a move that cannot get there fails with a reason and leaves the alias as it was.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mint_schemas.names import AliasName, parse_reference
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.orm import Session

from services.catalog import aliases, views
from services.catalog.clock import Clock
from services.catalog.database import Database
from services.catalog.drive import Driver
from services.catalog.tables import AliasRow, PolicyRow, PrewarmRow
from shared.bases import Base
from shared.catalog.api import AliasView, MoveAlias, Rollback
from shared.errors import Refused
from shared.validation import explain

POLL_S = 0.1
_ALIAS: TypeAdapter[str] = TypeAdapter(AliasName)


@dataclass
class Mover:
    database: Database
    driver: Driver
    bases: Mapping[str, Base]
    clock: Clock
    min_ready: int = 1
    _waiting: Counter[str] = field(default_factory=Counter)

    async def move(self, policy: str, alias: str, request: MoveAlias) -> AliasView:
        """Raises Refused: 400 for names, 404 for what is not there, 409 for a version or for readiness."""
        _check_alias(alias)
        revision = _revision_of(policy, request.revision)
        reason = _said(request.reason, request.force)
        wanted = aliases.Move(policy, alias, revision, request.actor, reason, request.expected_version)
        return await self._when_ready(wanted, request.timeout_s, request.force)

    async def rollback(self, policy: str, request: Rollback) -> AliasView:
        """Raises Refused like `move`; the version that holds now must still hold at the end."""
        to = _revision_of(policy, request.to) if request.to is not None else None
        target, version = await self.database.read(aliases.rollback_target, policy, request.alias, to)
        reason = _said("rollback", request.force)
        wanted = aliases.Move(policy, request.alias, target, request.actor, reason, version)
        return await self._when_ready(wanted, request.timeout_s, request.force)

    async def _when_ready(self, wanted: aliases.Move, timeout_s: float, force: bool) -> AliasView:
        deadline = self.clock() + timeout_s
        self._waiting[wanted.revision] += 1
        try:
            wanted = await self.database.write(_prepare, wanted, deadline)
            await self.driver.settle()
            while not force and (missing := self._missing(wanted.revision)) is not None:
                if self.clock() >= deadline:
                    raise Refused(f"{wanted.policy}:{wanted.alias} was not moved: {missing}", "not_ready", status=409)
                await asyncio.sleep(POLL_S)
            view = await self.database.write(_commit, wanted, self.bases, self.clock())
        finally:
            self._waiting[wanted.revision] -= 1
            if not self._waiting[wanted.revision]:
                del self._waiting[wanted.revision]
                await self.database.write(_forget, wanted.revision)
            await self.driver.settle()
        return view

    def _missing(self, revision: str) -> str | None:
        """What is not there yet, in words. Raises Refused when it cannot come."""
        readiness = self.driver.readiness()
        count = len(readiness.ready.get(revision, ()))
        if count >= self.min_ready:
            return None
        if revision in readiness.failed:
            reason = readiness.failed[revision]
            raise Refused(f"{revision} could not be loaded for serving: {reason}", "not_ready", status=409)
        return f"{revision} is ready on {count} of {self.min_ready} needed serving replicas"


def _prepare(session: Session, wanted: aliases.Move, until: float) -> aliases.Move:
    """Check what can be checked now, pin the version that holds, and ask for the target to be loaded."""
    if session.get(PolicyRow, wanted.policy) is None:
        raise Refused(f"there is no policy {wanted.policy}", "not_found", status=404)
    aliases.check_target(session, wanted.policy, wanted.revision)
    row = session.get(AliasRow, (wanted.policy, wanted.alias))
    version = row.version if row else 0
    if wanted.expected_version is not None and wanted.expected_version != version:
        aliases.refuse_version(session, wanted, version)
    # Another move may wait for the same revision, and longer.
    held = session.get(PrewarmRow, wanted.revision)
    session.merge(PrewarmRow(revision=wanted.revision, until=max(until, held.until if held else 0.0)))
    return replace(wanted, expected_version=version)


def _commit(session: Session, wanted: aliases.Move, bases: Mapping[str, Base], now: float) -> AliasView:
    policy = session.get(PolicyRow, wanted.policy)
    base = bases.get(policy.base) if policy else None
    if base is None:
        raise Refused(f"the base model of {wanted.policy} is not configured any more", "not_ready", status=409)
    aliases.check_target(session, wanted.policy, wanted.revision)
    return views.alias_view(aliases.move(session, wanted, base.token, now))


def _forget(session: Session, revision: str) -> None:
    row = session.get(PrewarmRow, revision)
    if row is not None:
        session.delete(row)


def _said(reason: str, force: bool) -> str:
    return f"{reason}, forced" if force else reason


def _check_alias(alias: str) -> None:
    try:
        _ALIAS.validate_python(alias)
    except ValidationError as error:
        raise Refused("; ".join(explain(error))) from None


def _revision_of(policy: str, text: str) -> str:
    """`tenant/policy@12`, or `@12` and `12` for short. Raises Refused."""
    short = text.removeprefix("@")
    full = f"{policy}@{short}" if short.isdigit() else text
    try:
        named = parse_reference(full)
    except ValueError as error:
        raise Refused(str(error)) from None
    if named.number is None:
        raise Refused(f"{text!r} names no revision; write {policy}@12")
    return str(named)
