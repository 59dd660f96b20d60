"""GET /v1/models and /v1/models/{id}: the base models, then the policies that `live` points into."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import Query
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.identity import Identity
from shared.catalog.api import PolicyView
from shared.errors import Retryable

__all__ = ["Model", "ModelList", "list_models", "retrieve_model"]

LIVE = "live"
PAGE = 100
MOST = 500
"""Policies that the catalog gives at a time."""


class Model(BaseModel):
    """`id` is what to put into a request's `model`; `revision` is what it means now."""

    id: str
    object: str = "model"
    created: int = Field(description="seconds since the epoch; 0 for a base model")
    owned_by: str = Field(description="the tenant, or `base`")
    base: str
    revision: str | None = None
    adapter_sha256: str | None = None


class ModelList(BaseModel):
    """One page, never the whole catalog: base models first, then policies in order of their names. What
    lies behind it is asked for with `after`."""

    object: str = "list"
    data: list[Model]
    first_id: str | None
    last_id: str | None = Field(description="`after` of the next page")
    has_more: bool = Field(description="whether a next page has anything")


async def list_models(
    gateway: Here,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = PAGE,
    after: Annotated[
        str | None, Query(max_length=400, pattern=r"^[^\x00-\x1f]*$", description="the id behind which to continue")
    ] = None,
) -> ModelList:
    bases = [_base(name) for name in sorted(gateway.bases)]
    ids = [model.id for model in bases]
    found = bases[ids.index(after) + 1 :] if after in ids else [] if after else bases
    if len(found) <= limit:
        found = found + await _policies(gateway, caller, None if after in ids else after, limit + 1 - len(found))
    page = found[:limit]
    return ModelList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(found) > limit,
    )


async def retrieve_model(id: str, gateway: Here, caller: Caller) -> Response:
    """A base model, or any reference: `tenant/policy`, `:alias` or `@N`."""
    target = await gateway.resolver.target(id, caller)
    if target.revision is None:
        return JSONResponse(_base(id).model_dump())
    model = Model(
        id=id,
        created=await _created(gateway, target.revision),
        owned_by=target.revision.partition("/")[0],
        base=target.base.name,
        revision=target.revision,
        adapter_sha256=target.adapter_sha256,
    )
    return JSONResponse(model.model_dump(), headers={"mint-resolution": "stale"} if target.stale else None)


async def _created(gateway: Gateway, revision: str) -> int:
    """0 while the catalog does not answer; what the model is was resolved already."""
    try:
        return _seconds((await gateway.catalog.revision(revision)).created_at)
    except Retryable:
        return 0


async def _policies(gateway: Gateway, caller: Identity, after: str | None, wanted: int) -> list[Model]:
    """Up to `wanted` live policies whose names sort behind `after`."""
    models: list[Model] = []
    while len(models) < wanted:
        page = await gateway.catalog.policies(
            tenant=caller.tenant, limit=min(MOST, wanted - len(models)), alias=LIVE, after=after
        )
        models += [_policy(view) for view in page.items if LIVE in view.aliases]
        if page.next_cursor is None:
            break
        after = page.items[-1].policy
    return models


def _base(name: str) -> Model:
    return Model(id=name, created=0, owned_by="base", base=name)


def _policy(view: PolicyView) -> Model:
    return Model(
        id=view.policy,
        created=_seconds(view.created_at),
        owned_by=view.tenant,
        base=view.base,
        revision=view.aliases[LIVE],
    )


def _seconds(text: str) -> int:
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except ValueError:
        return 0
