"""Saved checkpoints: published, given an expiry, copied, deleted, and described.

In: a training run and a checkpoint id, or a `tinker://` path. Invariant: what changes is the caller's own; what
another tenant published can be read and copied.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Header
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.identity import Identity
from services.gateway.tinker.errors import invalid, unsupported
from services.gateway.tinker.rest.paths import TinkerPath, checked_name, checkpoint_path, parse_path
from services.gateway.tinker.rest.runs import RunId
from services.gateway.tinker.rest.views import CopiedWeights, WeightsInfo, weights_info_of
from shared.catalog.operations import ChangePath, CopyPath, FinishSession, NewModel, NewSession, SessionView

__all__ = ["copy_weights", "delete_checkpoint", "publish", "set_ttl", "unpublish", "weights_info"]

Seconds = Annotated[int, Field(ge=1, le=10 * 366 * 24 * 3600)]


class Asked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Ttl(Asked):
    """null: it does not expire any more."""

    ttl_seconds: Seconds | None


class WeightsPath(Asked):
    tinker_path: Annotated[str, Field(max_length=1000)]


class CopyRequest(Asked):
    """Into a training run of its own: the slot `model_seq_id` of `session_id`, else a session made for it."""

    source_path: Annotated[str, Field(max_length=1000)]
    session_id: Annotated[str, Field(max_length=300)] | None = None
    model_seq_id: Annotated[int, Field(ge=0)] | None = None
    destination_project_id: Annotated[str, Field(max_length=200)] | None = None
    ttl_seconds: Seconds | None = None
    weights_access_token: str | None = None


async def delete_checkpoint(run_id: RunId, kind: str, name: str, gateway: Here, caller: Caller) -> Response:
    await gateway.operations.delete_path(str(checkpoint_path(run_id, kind, name)), caller.tenant)
    return Response(status_code=204)


async def publish(run_id: RunId, kind: str, name: str, gateway: Here, caller: Caller) -> Response:
    return await _change(gateway, caller, checkpoint_path(run_id, kind, name), published=True)


async def unpublish(run_id: RunId, kind: str, name: str, gateway: Here, caller: Caller) -> Response:
    return await _change(gateway, caller, checkpoint_path(run_id, kind, name), published=False)


async def set_ttl(run_id: RunId, kind: str, name: str, body: Ttl, gateway: Here, caller: Caller) -> Response:
    seconds = 0.0 if body.ttl_seconds is None else float(body.ttl_seconds)
    return await _change(gateway, caller, checkpoint_path(run_id, kind, name), ttl_s=seconds)


async def weights_info(body: WeightsPath, gateway: Here, caller: Caller) -> WeightsInfo:
    path = str(parse_path(body.tinker_path))
    return weights_info_of(await gateway.operations.resolve_path(path, caller.tenant))


async def copy_weights(
    body: CopyRequest,
    gateway: Here,
    caller: Caller,
    x_tinker_weights_access_token: Annotated[str | None, Header(max_length=10_000)] = None,
) -> CopiedWeights:
    """The copy names the same files: nothing is duplicated, and each may expire without the other."""
    if body.weights_access_token is not None or x_tinker_weights_access_token is not None:
        raise unsupported("weights_access_token", "publish the checkpoint to let others read it")
    source = await gateway.operations.resolve_path(str(parse_path(body.source_path)), caller.tenant)
    session, number = await _slot(gateway, caller, body)
    owner = session.tenant
    await gateway.operations.new_model(
        NewModel(
            tenant=owner,
            actor=caller.actor,
            session_id=session.session_id,
            model_seq_id=number,
            base=source.base,
            lora=source.lora,
            train_unembed=source.train_unembed,
        )
    )
    target = TinkerPath(f"{session.session_id}:train:{number}", source.kind, source.name)
    copied = await gateway.operations.copy_path(
        CopyPath(tenant=owner, actor=caller.actor, source=source.path, target=str(target))
    )
    if body.ttl_seconds is not None:
        await _change(gateway, Identity(owner, caller.actor), target, ttl_s=float(body.ttl_seconds))
    if body.session_id is None:
        done = FinishSession(tenant=owner, actor=caller.actor, reason="it held a copy, which is made")
        await gateway.operations.finish_session(session.session_id, done)
    return CopiedWeights(tinker_path=copied.path)


async def _slot(gateway: Gateway, caller: Identity, body: CopyRequest) -> tuple[SessionView, int]:
    """The session of the copy, and its training run's number there."""
    if body.session_id is not None and body.model_seq_id is not None:
        session_id = checked_name(body.session_id, "session id")
        return await gateway.operations.session(session_id, caller.tenant), body.model_seq_id
    if body.session_id is not None or body.model_seq_id is not None:
        raise invalid("session_id and model_seq_id are given together, or neither")
    project = body.destination_project_id
    session = await gateway.operations.new_session(
        NewSession(
            tenant=caller.tenant or gateway.settings.gateway_local_tenant,
            actor=caller.actor,
            tags=("copy",),
            user_metadata={} if project is None else {"destination_project_id": project},
        )
    )
    return session, 0


async def _change(
    gateway: Gateway,
    caller: Identity,
    path: TinkerPath,
    published: bool | None = None,
    ttl_s: float | None = None,
) -> Response:
    change = ChangePath(tenant=caller.tenant, actor=caller.actor, path=str(path), published=published, ttl_s=ttl_s)
    await gateway.operations.change_path(change)
    return Response(status_code=204)
