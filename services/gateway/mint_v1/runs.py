"""Runs as people see them: list, show, journal, cancel."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from services.gateway.edge import Caller, Here
from services.gateway.mint_v1.owned import Cursor, Limit, PolicyFilter, RunId, TenantFilter, owned_run
from shared.catalog.api import CancelRequest, JournalEntry, Page, RunView

__all__ = ["Cancel", "cancel_run", "list_runs", "run_journal", "show_run"]

State = Literal["queued", "running", "evaluating", "promoting", "completed", "failed", "cancelled"]


class Cancel(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        json_schema_extra={"examples": [{"reason": "trained on the wrong file"}]},
    )
    reason: Annotated[str, Field(min_length=1, max_length=500)] = "cancelled by request"


async def list_runs(
    gateway: Here,
    caller: Caller,
    tenant: TenantFilter = None,
    policy: PolicyFilter = None,
    state: State | SkipJsonSchema[None] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[RunView]:
    """Newest first."""
    scope = caller.scope(tenant)
    return await gateway.catalog.runs(tenant=scope, policy=policy, state=state, limit=limit, cursor=cursor)


async def show_run(run_id: RunId, gateway: Here, caller: Caller) -> RunView:
    """What was asked, where it is, and what came of it."""
    return await owned_run(gateway, caller, run_id)


async def run_journal(
    run_id: RunId, gateway: Here, caller: Caller, after: Annotated[int, Query(ge=0, lt=2**63)] = 0
) -> list[JournalEntry]:
    """Every fact of the run behind number `after`, in order."""
    await owned_run(gateway, caller, run_id)
    return await gateway.catalog.journal(run_id, after)


async def cancel_run(run_id: RunId, gateway: Here, caller: Caller, body: Cancel | None = None) -> RunView:
    """Ends the run within one step; revisions made so far stay. A run that is over stays as it is."""
    await owned_run(gateway, caller, run_id)
    reason = (body or Cancel()).reason
    return await gateway.catalog.cancel(run_id, CancelRequest(actor=caller.actor, reason=reason))
