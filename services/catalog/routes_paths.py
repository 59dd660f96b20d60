"""Routes about paths."""

from __future__ import annotations

from fastapi import APIRouter, Query

from services.catalog import imports, path_changes, paths
from services.catalog.errors import CatalogRoute
from services.catalog.parts import Parts
from services.catalog.verify import verify_refs
from shared.catalog.operations import ChangePath, CopyPath, ImportPath, OperationView, PathPage, PathView

MAX_PAGE = 1000


def path_routes(parts: Parts) -> APIRouter:
    router = APIRouter(prefix="/internal/v1/paths", route_class=CatalogRoute)
    database, rules, clock = parts.database, parts.rules, parts.clock

    @router.get("")
    async def list_paths(
        tenant: str | None = None,
        model_id: str | None = None,
        limit: int = Query(100, ge=1, le=MAX_PAGE),
        offset: int = Query(0, ge=0),
    ) -> PathPage:
        return await database.read(paths.list_paths, tenant, model_id, limit, offset, clock())

    @router.get("/resolve")
    async def resolve(path: str, tenant: str | None = None) -> PathView:
        return await database.read(paths.resolve, path, tenant, clock())

    @router.post("/change")
    async def change(request: ChangePath) -> PathView:
        return await database.write(path_changes.change, request, clock())

    @router.post("/copy")
    async def copy(request: CopyPath) -> PathView:
        return await database.write(path_changes.copy, request, rules, clock())

    @router.post("/import")
    async def import_path(request: ImportPath) -> OperationView:
        await verify_refs(parts.store, list(request.files.values()))
        view = await database.write(imports.import_path, request, rules, clock())
        parts.driver.wake()
        return view

    @router.delete("")
    async def delete(path: str, tenant: str | None = None) -> dict[str, str]:
        await database.write(path_changes.delete, path, tenant, rules, clock())
        return {}

    return router
