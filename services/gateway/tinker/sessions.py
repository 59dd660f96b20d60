"""Sessions: begun, kept alive, finished.

In: what a client says of itself. Out: a session id that models and samplers belong to. Invariant: a session has one
tenant from its beginning; a key that acts for every tenant begins sessions of the tenant that the settings name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Path
from starlette.responses import Response

from services.gateway.edge import Caller, Here
from services.gateway.identity import Identity
from services.gateway.tinker.errors import invalid, unsupported
from services.gateway.tinker.messages import CreateSession, FinishSession, Heartbeat
from services.gateway.tinker.rest.paths import checked_name
from shared.catalog import operations as ops

__all__ = ["begin_session", "finish_session", "said_by", "session_heartbeat", "texts"]

MAX_METADATA_BYTES = 16 << 10


def said_by(caller: Identity) -> ops.Caller:
    return ops.Caller(tenant=caller.tenant, actor=caller.actor)


def texts(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """Metadata as it is stored: texts; what is no text is its JSON. Raises Refused (422) for more than is kept: it is
    shown with each of its session or model, in lists too."""
    try:
        found = {
            key: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            for key, value in (metadata or {}).items()
        }
        size = sum(len(text.encode()) for pair in found.items() for text in pair)
    except (RecursionError, UnicodeEncodeError) as error:
        raise invalid(f"user_metadata cannot be kept: {error}") from error
    if size > MAX_METADATA_BYTES:
        raise invalid(f"user_metadata has {size} bytes; at most {MAX_METADATA_BYTES} are kept, so leave some out")
    return found


async def begin_session(body: CreateSession, gateway: Here, caller: Caller) -> dict[str, Any]:
    if body.project_id is not None:
        raise unsupported("project_id", "leave it out: a key's tenant has all of its sessions")
    metadata = texts(body.user_metadata)
    if body.display_name is not None:
        metadata["display_name"] = body.display_name
    session = await gateway.operations.new_session(
        ops.NewSession(
            tenant=caller.tenant or gateway.settings.gateway_local_tenant,
            actor=caller.actor,
            sdk_version=body.sdk_version,
            tags=tuple(body.tags),
            user_metadata=metadata,
        )
    )
    return {"type": "create_session", "session_id": session.session_id}


async def session_heartbeat(body: Heartbeat, gateway: Here, caller: Caller) -> dict[str, str]:
    """410 for a session that is finished or was silent for too long."""
    await gateway.operations.heartbeat(checked_name(body.session_id, "session id"), said_by(caller))
    return {"type": "session_heartbeat"}


async def finish_session(
    session_id: Annotated[str, Path(max_length=300)], body: FinishSession, gateway: Here, caller: Caller
) -> Response:
    """Its models are unloaded and its ephemeral samplers end; the first reason stays."""
    reason = ": ".join(part for part in (body.reason.type if body.reason else "", body.detail or "") if part)
    request = ops.FinishSession(tenant=caller.tenant, actor=caller.actor, reason=reason)
    await gateway.operations.finish_session(checked_name(session_id, "session id"), request)
    return Response(status_code=204)
