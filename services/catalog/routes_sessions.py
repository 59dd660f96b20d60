"""Routes about sessions, models and samplers."""

from __future__ import annotations

from fastapi import APIRouter, Query
from sqlalchemy.orm import Session

from services.catalog import ended_samples, models, new_models, samplers, sessions
from services.catalog.errors import CatalogRoute
from services.catalog.operation_rules import OperationRules
from services.catalog.parts import Parts
from shared.catalog.operations import (
    AwaitSamples,
    Caller,
    FinishSession,
    ModelPage,
    ModelView,
    NewModel,
    NewSampler,
    NewSession,
    OperationView,
    SamplerJoined,
    SamplerView,
    SamplesEnded,
    SessionHead,
    SessionPage,
    SessionView,
)

MAX_PAGE = 1000


def session_routes(parts: Parts) -> APIRouter:
    router = APIRouter(prefix="/internal/v1", route_class=CatalogRoute)

    @router.post("/sessions")
    async def new_session(request: NewSession) -> SessionView:
        return await parts.database.write(sessions.new_session, request, parts.rules, parts.clock())

    @router.post("/sessions/{session_id}/heartbeat")
    async def heartbeat(session_id: str, caller: Caller) -> SessionHead:
        return await parts.database.write(sessions.heartbeat, session_id, caller.tenant, parts.clock())

    @router.post("/sessions/{session_id}/finish")
    async def finish(session_id: str, request: FinishSession) -> SessionView:
        view = await parts.database.write(_finish, session_id, request, parts.rules, parts.clock())
        parts.driver.wake()
        return view

    @router.get("/sessions")
    async def list_sessions(
        tenant: str | None = None, limit: int = Query(20, ge=1, le=MAX_PAGE), offset: int = Query(0, ge=0)
    ) -> SessionPage:
        return await parts.database.read(sessions.list_sessions, tenant, limit, offset)

    @router.get("/sessions/{session_id}")
    async def show_session(session_id: str, tenant: str | None = None) -> SessionView:
        return await parts.database.read(sessions.show, session_id, tenant)

    @router.post("/models")
    async def new_model(request: NewModel) -> OperationView:
        view = await parts.database.write(new_models.new_model, request, parts.rules, parts.clock())
        parts.driver.wake()
        return view

    @router.get("/models")
    async def list_models(
        tenant: str | None = None, limit: int = Query(20, ge=1, le=MAX_PAGE), offset: int = Query(0, ge=0)
    ) -> ModelPage:
        return await parts.database.read(models.list_models, tenant, limit, offset)

    @router.get("/models/{model_id:path}")
    async def show_model(model_id: str, tenant: str | None = None) -> ModelView:
        return await parts.database.read(models.show, model_id, tenant)

    @router.post("/samplers")
    async def new_sampler(request: NewSampler) -> SamplerView:
        return await parts.database.write(samplers.new_sampler, request, parts.rules, parts.clock())

    @router.post("/samplers/{sampler_id}/join")
    async def join_sampler(sampler_id: str, caller: Caller) -> SamplerJoined:
        return await parts.database.write(samplers.join, sampler_id, caller.tenant, parts.clock())

    @router.post("/samplers/{sampler_id}/ended")
    async def await_samples(sampler_id: str, request: AwaitSamples) -> SamplesEnded:
        return await ended_samples.wait(parts.database, parts.waiters, sampler_id, request)

    @router.get("/samplers/{sampler_id:path}")
    async def show_sampler(sampler_id: str, tenant: str | None = None) -> SamplerView:
        return await parts.database.read(samplers.show, sampler_id, tenant)

    return router


def _finish(
    session: Session, session_id: str, request: FinishSession, rules: OperationRules, now: float
) -> SessionView:
    row = sessions.finish(session, session_id, request, rules, now)
    models.unload_all(session, row.session_id, rules, now)
    return sessions.view(session, row)
