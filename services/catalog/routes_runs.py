"""Routes about runs: validate, list, show, journal, cancel, evaluations."""

from __future__ import annotations

from fastapi import APIRouter
from mint_schemas.cloudevents import run_id_for
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import runs, scorings, views
from services.catalog.cursors import page
from services.catalog.errors import CatalogRoute
from services.catalog.parts import Parts
from services.catalog.tables import RunRow
from shared.catalog.api import (
    CancelRequest,
    EvaluationView,
    JournalEntry,
    Page,
    ResolvedRevision,
    RunView,
    StartEvaluation,
    ValidateAnswer,
    ValidateRequest,
)
from shared.errors import Refused


def run_routes(parts: Parts) -> APIRouter:
    router = APIRouter(prefix="/internal/v1", route_class=CatalogRoute)

    @router.post("/runs/validate")
    async def validate(request: ValidateRequest) -> ValidateAnswer:
        checked = await parts.validator.check(request.request, request.tenant)
        return ValidateAnswer(ok=not checked.errors, errors=checked.errors, resolved=checked.resolved)

    @router.get("/runs")
    async def list_runs(
        tenant: str | None = None,
        policy: str | None = None,
        state: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[RunView]:
        return await parts.database.read(_runs, tenant, policy, state, limit, cursor)

    @router.get("/runs/{run_id}")
    async def show(run_id: str) -> RunView:
        return await parts.database.read(_show, run_id)

    @router.get("/runs/{run_id}/journal")
    async def journal(run_id: str, after: int = 0) -> list[JournalEntry]:
        await parts.database.read(_show, run_id)
        return await parts.database.read(views.journal, run_id, after)

    @router.post("/runs/{run_id}/cancel")
    async def cancel(run_id: str, request: CancelRequest) -> RunView:
        view = await parts.database.write(_cancel, run_id, request, parts)
        await parts.driver.settle()
        return view

    @router.get("/evaluations")
    async def evaluations(run_id: str | None = None, revision: str | None = None) -> list[EvaluationView]:
        return await parts.database.read(views.evaluations, run_id, revision)

    @router.post("/evaluations")
    async def evaluate(request: StartEvaluation) -> RunView:
        known = await parts.database.read(scorings.find, request)
        if known is None:
            found = await parts.database.read(scorings.subject, request.reference, parts.bases)
            tenant = (found.policy or "").split("/", 1)[0]
            scoring = await parts.validator.scoring(request.evaluation, parts.bases[found.base], tenant)
            run_id = await parts.database.write(_evaluate, request, found, scoring, parts)
            await parts.driver.advance(run_id)
        return await parts.database.read(_show, run_id_for(scorings.SOURCE, request.key))

    return router


def _runs(
    session: Session, tenant: str | None, policy: str | None, state: str | None, limit: int, cursor: str | None
) -> Page[RunView]:
    """Newest first."""
    query = select(RunRow)
    for column, value in ((RunRow.tenant, tenant), (RunRow.policy, policy), (RunRow.state, state)):
        if value is not None:
            query = query.where(column == value)
    return page(session, query, RunRow.seq, limit, cursor, lambda row: views.run_view(session, row))


def _find(session: Session, run_id: str) -> RunRow:
    row = runs.find(session, run_id)
    if row is None:
        raise Refused(f"there is no run {run_id[:80]}; `mint runs` lists them", code="not_found", status=404)
    return row


def _show(session: Session, run_id: str) -> RunView:
    return views.run_view(session, _find(session, run_id))


def _evaluate(
    session: Session, request: StartEvaluation, found: ResolvedRevision, scoring: runs.Scoring, parts: Parts
) -> str:
    return scorings.begin(session, request, found, scoring, parts.bases, parts.clock()).run_id


def _cancel(session: Session, run_id: str, request: CancelRequest, parts: Parts) -> RunView:
    """A cancelled run again: its view. Raises Refused (409) for a run that ended otherwise."""
    row = _find(session, run_id)
    if row.state in ("completed", "failed"):
        raise Refused(f"run {run_id} is {row.state} already: {row.outcome}", code="run_ended", status=409)
    runs.end(session, row, "cancelled", f"{request.reason} ({request.actor})", parts.bases, parts.clock())
    return views.run_view(session, row)
