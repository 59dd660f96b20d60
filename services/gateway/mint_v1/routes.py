"""The routes of `/mint/v1`, in one table."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from services.gateway.documented import EVERY_METHOD, said
from services.gateway.edge import EdgeRoute, no_such_route
from services.gateway.mint_v1 import policies, revisions, runs
from services.gateway.mint_v1.data import put_data
from services.gateway.mint_v1.progress import run_progress
from services.gateway.mint_v1.rollouts import show_rollouts
from services.gateway.mint_v1.status import show_status
from services.gateway.mint_v1.submit import submit_run

__all__ = ["mint_router"]


class Error(BaseModel):
    """`errors` lists every fault of a request that has several; `near` what was perhaps meant. The queue
    fields come with 503 and 429 where they are known."""

    code: str
    message: str
    near: list[str] = []
    errors: list[str] = []
    queue_position: int | None = None
    expected_wait_s: float | None = None


class ErrorAnswer(BaseModel):
    error: Error


FAILURES = said(
    ErrorAnswer,
    _401="no key, or an unknown one",
    _404="unknown, or another tenant's",
    _409="a condition did not hold",
    _422="not what is allowed; every fault in words",
    _503="a part does not answer; try again after Retry-After seconds",
)
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}, "description": "the journal"}}
ARCHIVE: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-tar": {}}, "description": "the adapter"}}


def mint_router(route: type[EdgeRoute]) -> APIRouter:
    router = APIRouter(prefix="/mint/v1", route_class=route, tags=["mint"], responses=FAILURES)
    get, post = ["GET"], ["POST"]
    router.add_api_route("/runs", submit_run, methods=post, status_code=202)
    router.add_api_route("/runs", runs.list_runs, methods=get)
    router.add_api_route("/runs/{run_id}", runs.show_run, methods=get)
    router.add_api_route("/runs/{run_id}/cancel", runs.cancel_run, methods=post)
    router.add_api_route("/runs/{run_id}/journal", runs.run_journal, methods=get)
    router.add_api_route("/runs/{run_id}/progress", run_progress, methods=get, responses=EVENTS)
    router.add_api_route("/runs/{run_id}/rollouts/{step}", show_rollouts, methods=get)
    router.add_api_route("/policies", policies.list_policies, methods=get)
    one = "/policies/{tenant}/{policy}"
    router.add_api_route(one, policies.show_policy, methods=get)
    router.add_api_route(f"{one}/revisions", policies.list_revisions, methods=get)
    router.add_api_route(f"{one}/moves", policies.list_moves, methods=get)
    router.add_api_route(f"{one}/aliases/{{alias}}", policies.move_alias, methods=post)
    router.add_api_route(f"{one}/rollback", policies.roll_back, methods=post)
    router.add_api_route(f"{one}/pin", policies.pin_policy, methods=post)
    revision = "/revisions/{tenant}/{policy}/{number}"
    router.add_api_route(revision, revisions.show_revision, methods=get)
    router.add_api_route(f"{revision}/manifest", revisions.revision_manifest, methods=get)
    router.add_api_route(f"{revision}/archive", revisions.revision_archive, methods=get, responses=ARCHIVE)
    router.add_api_route("/evaluations", policies.list_evaluations, methods=get)
    router.add_api_route("/data", put_data, methods=post, status_code=201)
    router.add_api_route("/status", show_status, methods=get)
    router.add_api_route("/{rest:path}", no_such_route, methods=EVERY_METHOD, include_in_schema=False)
    return router
