"""Futures: a result as soon as there is one, asked for as often as a client likes until it expires.

In: a request id. Out: the result in the encoding that the client takes; `try_again` when the hold is over; a failure as
`{error, category}`; 410 once it has expired. Invariants: a permanent failure is never a 5xx, which clients would repeat
for ever; a part that is away makes them wait, not spin; nothing is held for a client that has gone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.identity import Identity
from services.gateway.streaming import until_disconnect
from services.gateway.tinker.body import answer, takes_protobuf, written
from services.gateway.tinker.messages import RetrieveFuture
from services.gateway.tinker.rest.paths import checked_name
from services.gateway.tinker.results import result_json, result_protobuf, sampled_by
from shared.catalog.operations import Content, OperationView
from shared.errors import Fatal, Refused, Retryable
from shared.operations.content import read
from shared.operations.payload import Payload, Result, decode
from shared.store.port import BytesDiffer

__all__ = ["retrieve_future"]

logger = logging.getLogger(__name__)

METADATA_BYTES = 1 << 20
"""What is larger is announced first, to clients that ask for that."""
PAUSE_S = 1.0


async def retrieve_future(body: RetrieveFuture, request: Request, gateway: Here, caller: Caller) -> Response:
    """What nobody foresaw is a failure too: after a 5xx clients ask again at once, for ever."""
    request_id = checked_name(body.request_id, "request id")
    try:
        return await _retrieved(body, request_id, request, gateway, caller)
    except Refused:
        raise
    except Exception:
        logger.exception("future %s cannot be answered", request_id)
        message = f"the server cannot answer for {request_id}; its log says why"
        return await answer(request, written({"error": message, "category": "server"}))


async def _retrieved(
    body: RetrieveFuture, request_id: str, request: Request, gateway: Gateway, caller: Identity
) -> Response:
    view = await until_disconnect(request, _waited(gateway, caller, request_id))
    if view is None:
        return await answer(request, written(_try_again(request_id, "paused_capacity")))
    if view.expired:
        raise Refused(f"the result of {request_id} has expired", code="expired", status=410)
    if view.failure is not None:
        return await answer(request, written({"error": view.failure.message, "category": view.failure.category}))
    if view.state == "failed":
        return await answer(request, written({"error": "it failed without a reason", "category": "unknown"}))
    if view.state != "done":
        return await answer(request, written(_try_again(request_id, view.queue)))
    size = view.result.file.size if view.result is not None and view.result.file is not None else 0
    if body.allow_metadata_only and size > METADATA_BYTES:
        return await answer(request, written({"status": "complete_metadata", "response_payload_size": size}))
    return await _result(gateway, request, view)


async def _waited(gateway: Gateway, caller: Identity, request_id: str) -> OperationView | None:
    """The operation, done or as it is when the hold ends; None where the catalog did not answer until then."""
    loop = asyncio.get_running_loop()
    until = loop.time() + gateway.settings.gateway_hold_s
    while True:
        left = until - loop.time()
        try:
            return await gateway.operations.operation(request_id, caller.tenant, max(0.0, left))
        except Retryable as error:
            if left <= PAUSE_S:
                logger.warning("future %s: %s", request_id, error)
                return None
            await asyncio.sleep(PAUSE_S)


async def _result(gateway: Gateway, request: Request, view: OperationView) -> Response:
    try:
        value = None if view.result is None else await _read(gateway, view.result)
        protobuf = result_protobuf(value) if takes_protobuf(request) else None
        if protobuf is not None:
            data = await asyncio.to_thread(protobuf)
            return await answer(request, data, "application/x-protobuf", sampled_by(value))
        data = await asyncio.to_thread(lambda: written(result_json(view, value)))
        return await answer(request, data, headers=sampled_by(value))
    except (Fatal, BytesDiffer, ValueError) as error:
        logger.exception("the result of %s cannot be answered", view.request_id)
        message = f"the result is there and cannot be read: {error}"
        return await answer(request, written({"error": message, "category": "server"}))
    except Retryable as error:
        logger.warning("future %s: %s", view.request_id, error)
        await asyncio.sleep(PAUSE_S)
        return await answer(request, written(_try_again(view.request_id, "paused_capacity")))


async def _read(gateway: Gateway, kept: Content) -> Payload | Result:
    try:
        data = await read(gateway.store, kept)
    except BytesDiffer:
        # Perhaps it was cut on the way; what is broken in the store is so the second time too.
        data = await read(gateway.store, kept)
    return await asyncio.to_thread(decode, data)


def _try_again(request_id: str, queue: str) -> dict[str, Any]:
    return {"type": "try_again", "request_id": request_id, "queue_state": queue}
