"""Routes of the workers: take, renew, release, commit."""

from __future__ import annotations

from fastapi import APIRouter
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import commits, leases
from services.catalog.errors import WorkRoute
from services.catalog.model_end import TINKER
from services.catalog.parts import Parts
from services.catalog.tables import CommandRow, RunRow
from services.catalog.verify import verify_files
from shared.catalog.api import CommitAnswer, CommitRequest, LeaseRequest, RenewAnswer, TakeAnswer, TakeRequest
from shared.errors import Refused


def work_routes(parts: Parts) -> APIRouter:
    router = APIRouter(prefix="/internal/v1/commands", route_class=WorkRoute)

    @router.post("/take")
    async def take(request: TakeRequest) -> TakeAnswer:
        return await parts.database.write(leases.take, request, parts.lease_rules, parts.clock())

    @router.post("/renew")
    async def renew(request: LeaseRequest) -> RenewAnswer:
        return await parts.database.write(leases.renew, request, parts.lease_rules, parts.clock())

    @router.post("/release")
    async def release(request: LeaseRequest) -> dict[str, str]:
        await parts.database.write(leases.release, request, parts.clock())
        return {}

    @router.post("/commit")
    async def commit(request: CommitRequest) -> CommitAnswer:
        run_id = await parts.database.read(_uncommitted_run, request.command_id)
        if run_id is not None:
            await verify_files(parts.store, run_id, request.result)
        answer = await parts.database.write(commits.commit, request, parts.bases, parts.clock())
        if isinstance(answer, commits.CommitRefused):
            await parts.driver.settle()
            raise Refused(answer.message, answer.code, status=404 if answer.code == "not_found" else 409)
        if run_id is not None and await parts.database.read(_is_a_model_s, run_id):
            await parts.driver.advance(run_id)
        return answer

    return router


def _is_a_model_s(session: Session, run_id: str) -> bool:
    """Its client waits for the export, and need not wait for the event too."""
    return session.scalars(select(RunRow.method).where(RunRow.run_id == run_id)).one_or_none() == TINKER


def _uncommitted_run(session: Session, command_id: str) -> str | None:
    query = select(CommandRow.run_id).where(CommandRow.command_id == command_id, CommandRow.event.is_(None))
    return session.scalars(query).one_or_none()
