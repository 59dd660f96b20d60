"""Routes about API keys."""

from __future__ import annotations

from fastapi import APIRouter

from services.catalog import keys
from services.catalog.errors import CatalogRoute
from services.catalog.parts import Parts
from shared.catalog.api import Page
from shared.catalog.keys import KeyView, NewKey, RevokeKey, VerifyKey


def key_routes(parts: Parts) -> APIRouter:
    router = APIRouter(prefix="/internal/v1/keys", route_class=CatalogRoute)

    @router.post("")
    async def create(request: NewKey) -> KeyView:
        return await parts.database.write(keys.create, request, parts.bases, parts.clock())

    @router.post("/verify")
    async def verify(request: VerifyKey) -> KeyView:
        return await parts.database.read(keys.verify, request.sha256)

    @router.get("")
    async def list_keys(tenant: str | None = None, limit: int = 50, cursor: str | None = None) -> Page[KeyView]:
        return await parts.database.read(keys.list_keys, tenant, limit, cursor)

    @router.post("/{key_id}/revoke")
    async def revoke(key_id: str, request: RevokeKey) -> KeyView:
        return await parts.database.write(keys.revoke, key_id, request.actor, parts.clock())

    return router
