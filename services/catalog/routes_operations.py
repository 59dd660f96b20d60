"""Routes about operations and samples: their clients' and their workers'."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import APIRouter, Query

from services.catalog import operation_commits, operation_work, operations, samples
from services.catalog.errors import CatalogRoute
from services.catalog.parts import Parts
from services.catalog.payloads import read_payload, require_stored
from services.catalog.verify import verify_refs
from services.catalog.waiting import MAX_WAIT_S
from shared.catalog.api import RenewAnswer
from shared.catalog.operations import (
    Caller,
    CommitOperation,
    OperationsLease,
    OperationsTaken,
    OperationView,
    SampleTaken,
    Submit,
    SubmitSample,
    TakeOperations,
    TakeSample,
)


def operation_routes(parts: Parts) -> APIRouter:
    router = APIRouter(prefix="/internal/v1", route_class=CatalogRoute)
    database, rules, clock = parts.database, parts.rules, parts.clock

    @router.post("/operations")
    async def submit(request: Submit) -> OperationView:
        payload = await read_payload(parts.store, request)
        view = await database.write(operations.submit, request, payload, rules, clock())
        parts.driver.wake()
        return view

    @router.post("/operations/take")
    async def take(request: TakeOperations) -> OperationsTaken:
        return await database.write(operation_work.take, request, rules, clock())

    @router.post("/operations/renew")
    async def renew(request: OperationsLease) -> RenewAnswer:
        return await database.write(operation_work.renew, request, rules, clock())

    @router.post("/operations/release")
    async def release(request: OperationsLease) -> dict[str, str]:
        await database.write(operation_work.release, request, rules, clock())
        parts.driver.wake()
        return {}

    @router.post("/operations/commit")
    async def commit(request: CommitOperation) -> OperationView:
        if await database.read(operation_commits.is_open, request.request_id):
            await verify_refs(parts.store, operation_commits.named_files(request))
        view = await database.write(operation_commits.commit, request, rules, clock())
        parts.driver.wake()
        return view

    @router.get("/operations/{request_id}")
    async def operation(
        request_id: str, tenant: str | None = None, wait_s: float = Query(0.0, ge=0.0, le=MAX_WAIT_S)
    ) -> OperationView:
        with parts.waiters.watching(request_id) as over:
            view = await database.read(operations.show, request_id, tenant, clock())
            if wait_s == 0 or view.state in ("done", "failed"):
                return view
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await over.wait()
        return await database.read(operations.show, request_id, tenant, clock())

    @router.post("/operations/{request_id}/cancel")
    async def cancel(request_id: str, caller: Caller) -> OperationView:
        view = await database.write(operations.cancel, request_id, caller.tenant, rules, clock())
        parts.driver.wake()
        return view

    @router.post("/samples")
    async def submit_sample(request: SubmitSample) -> OperationView:
        await require_stored(parts.store, request.payload)
        view = await database.write(samples.submit, request, rules, clock())
        parts.driver.wake()
        return view

    @router.post("/samples/take")
    async def take_sample(request: TakeSample) -> SampleTaken:
        return await database.write(samples.take, request, rules, clock())

    return router
