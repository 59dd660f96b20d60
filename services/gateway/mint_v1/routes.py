"""The routes of `/mint/v1`, in one table.

What grows with a tenant is a page (`items`, `next_cursor`); what belongs to one run or one policy (its journal, its
alias moves, its scores) is a whole list.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from services.gateway.documented import EVERY_METHOD
from services.gateway.edge import EdgeRoute, no_such_route
from services.gateway.mint_v1 import data, evaluations, keys, policies, revisions, runs
from services.gateway.mint_v1.documented import TOO_LARGE, Responses, add, documented_router, said
from services.gateway.mint_v1.progress import run_progress
from services.gateway.mint_v1.rollouts import show_rollouts
from services.gateway.mint_v1.status import show_status
from services.gateway.mint_v1.submit import Submitted, submit_run

__all__ = ["mint_router"]

NO_FORM = said(_415="a form; the file itself is wanted as the body")
FORBIDDEN = said(_403="a tenant's key; keys are managed with a key of all tenants")
VALID: Responses = {200: {"description": "a dry run: the request is valid", "model": Submitted}}
EVENT = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "the entry's number, for Last-Event-ID"},
        "event": {"type": "string", "description": "the entry's type"},
        "data": {"type": "string", "description": "the entry, as JSON"},
    },
    "required": ["event", "data"],
}
EVENTS: Responses = {
    200: {
        "content": {"text/event-stream": {"schema": EVENT}},
        "description": "an event for each entry of the journal, then `end` with the run",
    }
}
ARCHIVE: Responses = {
    200: {
        "content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}},
        "description": "manifest.json, adapter_config.json and adapter_model.safetensors (PEFT layout)",
    }
}
FILE = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary", "minLength": 1}}},
    }
}


def mint_router(route: type[EdgeRoute]) -> APIRouter:
    router = documented_router(route)
    _runs(router)
    _policies(router)
    add(router, "GET", "/evaluations", evaluations.list_evaluations, "Scores of a run or a revision")
    started: Any = {"status_code": 202, "responses": TOO_LARGE}
    add(router, "POST", "/evaluations", evaluations.start_evaluation, "Score a revision", **started)
    add(router, "GET", "/evaluations/{evaluation_id}", evaluations.show_evaluation, "One score")
    add(router, "GET", "/data", data.list_data, "A tenant's files")
    upload: Any = {"status_code": 201, "responses": TOO_LARGE | NO_FORM, "openapi_extra": FILE}
    add(router, "POST", "/data", data.put_data, "Upload a file to train or score on", **upload)
    created: Any = {"status_code": 201, "responses": FORBIDDEN | TOO_LARGE}
    add(router, "GET", "/keys", keys.list_keys, "API keys", responses=FORBIDDEN)
    add(router, "POST", "/keys", keys.create_key, "Make a tenant's API key", **created)
    add(router, "DELETE", "/keys/{key_id}", keys.revoke_key, "Revoke an API key", responses=FORBIDDEN)
    add(router, "GET", "/status", show_status, "Base models, serving replicas, and whether the catalog answers")
    router.add_api_route("/{rest:anything}", no_such_route, methods=EVERY_METHOD, include_in_schema=False)
    return router


def _runs(router: APIRouter) -> None:
    submitted: Any = {"status_code": 202, "responses": TOO_LARGE | VALID}
    add(router, "POST", "/runs", submit_run, "Ask for a better policy", **submitted)
    add(router, "GET", "/runs", runs.list_runs, "Runs")
    one = "/runs/{run_id}"
    add(router, "GET", one, runs.show_run, "One run")
    add(router, "POST", f"{one}/cancel", runs.cancel_run, "End a run", responses=TOO_LARGE)
    add(router, "GET", f"{one}/journal", runs.run_journal, "Every fact of a run")
    add(router, "GET", f"{one}/progress", run_progress, "Watch a run", responses=EVENTS, response_class=Response)
    add(router, "GET", f"{one}/rollouts/{{step}}", show_rollouts, "The samples that a step learned from")


def _policies(router: APIRouter) -> None:
    add(router, "GET", "/policies", policies.list_policies, "Policies")
    one = "/policies/{tenant}/{policy}"
    add(router, "GET", one, policies.show_policy, "One policy")
    add(router, "GET", f"{one}/revisions", policies.list_revisions, "A policy's revisions")
    add(router, "GET", f"{one}/moves", policies.list_moves, "Where a policy's aliases pointed, and who moved them")
    add(router, "POST", f"{one}/aliases/{{alias}}", policies.move_alias, "Move an alias", responses=TOO_LARGE)
    add(router, "POST", f"{one}/rollback", policies.roll_back, "Move an alias back", responses=TOO_LARGE)
    add(router, "POST", f"{one}/pin", policies.pin_policy, "Keep a policy resident", responses=TOO_LARGE)
    revision = "/revisions/{tenant}/{policy}/{number}"
    add(router, "GET", revision, revisions.show_revision, "One revision")
    add(router, "GET", f"{revision}/manifest", revisions.revision_manifest, "What a loader must know of a revision")
    packed: Any = {"responses": ARCHIVE, "response_class": Response}
    add(router, "GET", f"{revision}/archive", revisions.revision_archive, "A revision's adapter, packed", **packed)
