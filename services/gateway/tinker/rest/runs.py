"""Training runs and sessions, read: what the caller's tenant has, in pages.

Invariant: a page is cut by the catalog's own order, so that pages put together are the whole list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Literal, Protocol, TypeVar

from fastapi import Path, Query

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.tinker.errors import unsupported
from services.gateway.tinker.rest.paths import checked_name
from services.gateway.tinker.rest.views import (
    Checkpoints,
    Cursor,
    SessionAnswer,
    SessionIds,
    TrainingRun,
    TrainingRuns,
    checkpoint_of,
    run_of,
    session_of,
)
from shared.catalog.operations import ModelView, PathView

__all__ = [
    "Limit",
    "Offset",
    "RunId",
    "list_checkpoints",
    "list_runs",
    "list_sessions",
    "list_user_checkpoints",
    "show_run",
    "show_session",
]

T = TypeVar("T", covariant=True)
Item = TypeVar("Item")

PAGE = 100
TOGETHER = 10
"""Runs of a page whose checkpoints are asked for at a time."""

RunId = Annotated[str, Path(max_length=300, description="a training run is named by its model id")]
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=1_000_000_000)]
Scope = Annotated[
    Literal["owned", "accessible"], Query(description="the same here: a key's tenant owns what the key can list")
]
Project = Annotated[str | None, Query(max_length=200)]


class Page(Protocol[T]):
    @property
    def items(self) -> Sequence[T]: ...
    @property
    def total(self) -> int: ...


async def list_runs(
    gateway: Here,
    caller: Caller,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: Project = None,
) -> TrainingRuns:
    if project_id is not None:
        raise unsupported("project_id", "a key's tenant has all of its runs")
    models, total = await _gather(lambda size, at: gateway.operations.models(caller.tenant, size, at), limit, offset)
    runs: list[TrainingRun] = []
    for start in range(0, len(models), TOGETHER):
        runs += await asyncio.gather(*(_run(gateway, model) for model in models[start : start + TOGETHER]))
    return TrainingRuns(training_runs=runs, cursor=Cursor(offset=offset, limit=limit, total_count=total))


async def show_run(run_id: RunId, gateway: Here, caller: Caller, access_scope: Scope = "owned") -> TrainingRun:
    return await _run(gateway, await _owned(gateway, caller.tenant, run_id))


async def list_checkpoints(run_id: RunId, gateway: Here, caller: Caller) -> Checkpoints:
    """All of them: clients of this route know no pages."""
    model = await _owned(gateway, caller.tenant, run_id)
    return Checkpoints(checkpoints=[checkpoint_of(path) for path in await _paths(gateway, model)])


async def list_user_checkpoints(gateway: Here, caller: Caller, limit: Limit = 100, offset: Offset = 0) -> Checkpoints:
    """Of every run of the tenant, newest first."""
    paths, total = await _gather(
        lambda size, at: gateway.operations.paths(caller.tenant, None, size, at), limit, offset
    )
    cursor = Cursor(offset=offset, limit=limit, total_count=total)
    return Checkpoints(checkpoints=[checkpoint_of(path) for path in paths], cursor=cursor)


async def list_sessions(
    gateway: Here, caller: Caller, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
) -> SessionIds:
    sessions, _ = await _gather(lambda size, at: gateway.operations.sessions(caller.tenant, size, at), limit, offset)
    return SessionIds(sessions=[session.session_id for session in sessions])


async def show_session(
    session_id: Annotated[str, Path(max_length=300)], gateway: Here, caller: Caller, access_scope: Scope = "owned"
) -> SessionAnswer:
    return session_of(await gateway.operations.session(checked_name(session_id, "session id"), caller.tenant))


async def _owned(gateway: Gateway, tenant: str | None, run_id: str) -> ModelView:
    return await gateway.operations.model(checked_name(run_id, "training run"), tenant)


async def _run(gateway: Gateway, model: ModelView) -> TrainingRun:
    return run_of(model, await _paths(gateway, model))


async def _paths(gateway: Gateway, model: ModelView) -> list[PathView]:
    paths, _ = await _gather(lambda size, at: gateway.operations.paths(model.tenant, model.model_id, size, at), None, 0)
    return paths


async def _gather(
    call: Callable[[int, int], Awaitable[Page[Item]]], limit: int | None, offset: int
) -> tuple[list[Item], int]:
    """`limit` items from `offset` (all where it is None), and how many there are in all."""
    found: list[Item] = []
    while True:
        wanted = PAGE if limit is None else min(PAGE, limit - len(found))
        page = await call(wanted, offset + len(found))
        found += page.items
        if not page.items or offset + len(found) >= page.total or (limit is not None and len(found) >= limit):
            return found, page.total
