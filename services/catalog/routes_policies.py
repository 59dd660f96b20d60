"""Routes about policies, revisions, aliases, resolution and data."""

from __future__ import annotations

from fastapi import APIRouter
from mint_schemas.common import FileRef
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import datarefs, pins, views
from services.catalog.cursors import page
from services.catalog.errors import CatalogRoute
from services.catalog.lineage import find_revision
from services.catalog.listing import list_policies
from services.catalog.parts import Parts
from services.catalog.readiness import Readiness
from services.catalog.resolve import resolve as resolve_reference
from services.catalog.tables import PolicyRow, RevisionRow
from shared.catalog.api import (
    AliasMove,
    AliasView,
    DataView,
    MoveAlias,
    Page,
    PinPolicy,
    PolicyView,
    ResolvedRevision,
    RevisionView,
    Rollback,
)
from shared.errors import Refused


class DataRegistration(FileRef):
    """A file that is in the store already, and whose it is."""

    tenant: str


def policy_routes(parts: Parts) -> APIRouter:
    router = APIRouter(prefix="/internal/v1", route_class=CatalogRoute)

    @router.get("/resolve")
    async def resolve(reference: str) -> ResolvedRevision:
        return await parts.database.read(resolve_reference, reference, parts.bases)

    @router.get("/revisions/{tenant}/{policy}/{number}")
    async def revision(tenant: str, policy: str, number: int) -> RevisionView:
        return await parts.database.read(_revision, f"{tenant}/{policy}@{number}", parts.driver.readiness())

    @router.get("/policies")
    async def policies(
        tenant: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        alias: str | None = None,
        after: str | None = None,
    ) -> Page[PolicyView]:
        """By name; `alias`: only those that have it; `after`: only names that sort behind it."""
        return await parts.database.read(list_policies, tenant, limit, cursor, alias, after)

    @router.get("/policies/{tenant}/{policy}")
    async def show(tenant: str, policy: str) -> PolicyView:
        return await parts.database.read(_policy, f"{tenant}/{policy}")

    @router.get("/policies/{tenant}/{policy}/revisions")
    async def revisions(tenant: str, policy: str, limit: int = 50, cursor: str | None = None) -> Page[RevisionView]:
        await parts.database.read(_policy, f"{tenant}/{policy}")
        return await parts.database.read(_revisions, f"{tenant}/{policy}", limit, cursor, parts.driver.readiness())

    @router.get("/policies/{tenant}/{policy}/moves")
    async def moves(tenant: str, policy: str) -> list[AliasMove]:
        await parts.database.read(_policy, f"{tenant}/{policy}")
        return await parts.database.read(views.moves, f"{tenant}/{policy}")

    @router.post("/policies/{tenant}/{policy}/aliases/{alias}")
    async def move(tenant: str, policy: str, alias: str, request: MoveAlias) -> AliasView:
        return await parts.mover.move(f"{tenant}/{policy}", alias, request)

    @router.post("/policies/{tenant}/{policy}/rollback")
    async def rollback(tenant: str, policy: str, request: Rollback) -> AliasView:
        return await parts.mover.rollback(f"{tenant}/{policy}", request)

    @router.post("/policies/{tenant}/{policy}/pin")
    async def pin(tenant: str, policy: str, request: PinPolicy) -> PolicyView:
        view = await parts.database.write(pins.pin, f"{tenant}/{policy}", request.pinned, parts.tenant_pins)
        await parts.driver.settle()
        return view

    @router.post("/data")
    async def register(request: DataRegistration) -> FileRef:
        ref = FileRef(key=request.key, sha256=request.sha256, size=request.size)
        if await parts.store.size(ref.key) != ref.size:
            raise Refused(f"{ref.key} is not in the store with {ref.size} bytes; put the file first", status=409)
        return await parts.database.write(datarefs.register, request.tenant, ref, parts.clock())

    @router.get("/data/{tenant}")
    async def list_data(tenant: str, limit: int = 50, cursor: str | None = None) -> Page[DataView]:
        return await parts.database.read(datarefs.list_data, tenant, limit, cursor)

    @router.get("/data/{tenant}/{sha256}")
    async def data(tenant: str, sha256: str) -> FileRef:
        return await parts.database.read(datarefs.find, tenant, sha256)

    return router


def _revision(session: Session, name: str, readiness: Readiness) -> RevisionView:
    row = find_revision(session, name)
    if row is None:
        raise Refused(f"there is no revision {name[:140]}", code="not_found", status=404)
    return views.revision_view(session, row, readiness)


def _policy(session: Session, name: str) -> PolicyView:
    row = session.get(PolicyRow, name)
    if row is None:
        raise Refused(f"there is no policy {name[:130]}; `mint policies` lists them", code="not_found", status=404)
    return views.policy_view(session, row)


def _revisions(
    session: Session, policy: str, limit: int, cursor: str | None, readiness: Readiness
) -> Page[RevisionView]:
    """Newest first, without the ephemeral ones."""
    query = select(RevisionRow).where(RevisionRow.policy == policy, RevisionRow.ephemeral.is_(False))
    return page(
        session, query, RevisionRow.number, limit, cursor, lambda row: views.revision_view(session, row, readiness)
    )
