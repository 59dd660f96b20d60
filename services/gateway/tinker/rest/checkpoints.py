"""Saved checkpoints: published, given an expiry, copied, deleted, and described.

In: a training run and a checkpoint id, or a `tinker://` path. Invariant: what changes is the caller's own; what
another tenant published can be read and copied.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Header
from mint_schemas.common import WHOLE, FileRef
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.identity import Identity
from services.gateway.tinker.errors import invalid, unsupported
from services.gateway.tinker.rest.paths import TinkerPath, checked_name, checkpoint_path, parse_path
from services.gateway.tinker.rest.runs import RunId
from services.gateway.tinker.rest.views import CopiedWeights, WeightsInfo, weights_info_of
from shared.catalog.operations import ChangePath, CopyPath, FinishSession, NewModel, NewSession, PathView, SessionView
from shared.errors import Refused

__all__ = ["copy_weights", "delete_checkpoint", "publish", "set_ttl", "unpublish", "weights_info"]

KEY = "idempotency_key"
LATEST = 100

Seconds = Annotated[int, Field(ge=1, le=10 * 366 * 24 * 3600), WHOLE]


class Asked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class Ttl(Asked):
    """null: it does not expire any more."""

    ttl_seconds: Seconds | None


class WeightsPath(Asked):
    tinker_path: Annotated[str, Field(max_length=1000)]


class CopyRequest(Asked):
    """Into a training run of its own: the slot `model_seq_id` of `session_id`, else a session made for it."""

    source_path: Annotated[str, Field(max_length=1000)]
    session_id: Annotated[str, Field(max_length=300)] | None = None
    model_seq_id: Annotated[int, Field(ge=0), WHOLE] | None = None
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
    x_idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> CopiedWeights:
    """The copy names the same files: nothing is duplicated, and each may expire without the other. Asked for again,
    into the same slot or under the same key, it is the same copy."""
    if body.weights_access_token is not None or x_tinker_weights_access_token is not None:
        raise unsupported("weights_access_token", "publish the checkpoint to let others read it")
    source = await gateway.operations.resolve_path(str(parse_path(body.source_path)), caller.tenant)
    session, number = await _slot(gateway, caller, body, x_idempotency_key)
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
    copied = await _copied(
        gateway, source, CopyPath(tenant=owner, actor=caller.actor, source=source.path, target=str(target))
    )
    if body.ttl_seconds is not None:
        await _change(gateway, Identity(owner, caller.actor), target, ttl_s=float(body.ttl_seconds))
    if body.session_id is None:
        done = FinishSession(tenant=owner, actor=caller.actor, reason="it held a copy, which is made")
        await gateway.operations.finish_session(session.session_id, done)
    return CopiedWeights(tinker_path=copied.path)


async def _copied(gateway: Gateway, source: PathView, request: CopyPath) -> PathView:
    try:
        return await gateway.operations.copy_path(request)
    except Refused as error:
        if error.code != "path_taken":
            raise
        there = await gateway.operations.resolve_path(request.target, request.tenant)
        if (there.revision, _files(there)) != (source.revision, _files(source)):
            raise
        return there


def _files(path: PathView) -> dict[str, FileRef]:
    """What a path of training weights is; one of sampler weights is its revision."""
    return {} if path.checkpoint is None or path.kind != "weights" else dict(path.checkpoint.files)


async def _slot(gateway: Gateway, caller: Identity, body: CopyRequest, key: str | None) -> tuple[SessionView, int]:
    """The session of the copy, and its training run's number there."""
    if body.session_id is not None and body.model_seq_id is not None:
        session_id = checked_name(body.session_id, "session id")
        return await gateway.operations.session(session_id, caller.tenant), body.model_seq_id
    if body.session_id is not None or body.model_seq_id is not None:
        raise invalid("session_id and model_seq_id are given together, or neither")
    owner = caller.tenant or gateway.settings.gateway_local_tenant
    said = {"destination_project_id": body.destination_project_id, KEY: key}
    metadata = {name: value for name, value in said.items() if value is not None}
    session = await _begun(gateway, owner, key) or await gateway.operations.new_session(
        NewSession(tenant=owner, actor=caller.actor, tags=("copy",), user_metadata=metadata)
    )
    return session, 0


async def _begun(gateway: Gateway, tenant: str, key: str | None) -> SessionView | None:
    """The session of the same copy, where its client lost the answer and asks again: among the latest ones."""
    if key is None:
        return None
    latest = await gateway.operations.sessions(tenant, LATEST, 0)
    for head in latest.items:
        if head.user_metadata.get(KEY) == key:
            session = await gateway.operations.session(head.session_id, tenant)
            # One that is over has its copy, or could not be used.
            if session.state == "open" or session.model_ids:
                return session
    return None


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
