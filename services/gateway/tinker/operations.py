"""Operations of a model, taken in: decoded, stored, and answered with a future.

In: a request with its model and number. Out: `{request_id, model_id}`, once the catalog has the row. Invariants: the
payload is in the store before the row names it; content that is not allowed is stored as a failed operation, so that
its number is used and what comes behind it does not wait; what is no request at all is refused and uses nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any, Protocol

from pydantic import ValidationError
from starlette.requests import Request

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.errors import Invalid
from services.gateway.identity import Identity
from services.gateway.tinker import json_wire, proto_wire
from services.gateway.tinker.body import few, is_protobuf, whole
from services.gateway.tinker.errors import invalid, unsupported
from services.gateway.tinker.messages import AdamParams, OptimStep, Place
from shared.catalog.operations import Content, Failure, OperationKind, OperationView, Submit
from shared.errors import Refused
from shared.operations.content import keep
from shared.operations.payload import AdamPayload, Payload, TrainPayload, digest, encode
from shared.validation import explain

__all__ = ["encoded", "forward", "forward_backward", "future", "optim_step", "submit", "submit_failed", "submit_read"]

MAX_MESSAGE = 4000


class Asked(Protocol):
    """A forward or forward_backward as it came; `payload` decodes the rest of it."""

    @property
    def model_id(self) -> Any: ...
    @property
    def seq_id(self) -> Any: ...
    @property
    def forward_only(self) -> bool: ...
    def payload(self, max_elements: int) -> TrainPayload: ...


async def forward(request: Request, gateway: Here, caller: Caller) -> dict[str, Any]:
    return await _train(request, gateway, caller, forward_only=True)


async def forward_backward(request: Request, gateway: Here, caller: Caller) -> dict[str, Any]:
    """JSON or protobuf; in protobuf `forward_only` makes it a forward."""
    return await _train(request, gateway, caller, forward_only=False)


async def optim_step(body: OptimStep, gateway: Here, caller: Caller) -> dict[str, Any]:
    place = Place(model_id=body.model_id, seq_id=body.seq_id)
    return await submit_read(gateway, caller, place, "optim_step", body.model_dump_json().encode(), lambda: _adam(body))


async def submit_read(
    gateway: Gateway,
    caller: Identity,
    place: Place,
    kind: OperationKind,
    sent: bytes,
    read: Callable[[], Payload],
) -> dict[str, Any]:
    """The future of what `read` decodes; where that is refused, of a failure. `sent` is what came."""
    try:
        value = await asyncio.to_thread(read)
    except Refused as error:
        return await submit_failed(gateway, caller, place, kind, sent, error)
    return await submit(gateway, caller, place, kind, value)


async def submit(
    gateway: Gateway, caller: Identity, place: Place, kind: OperationKind, value: Payload
) -> dict[str, Any]:
    """What the catalog does not find behind the payload's names fails too, and uses its number.

    Raises Refused: 404 for another's model, 409 where the number has another content, 410 for an ended session."""
    data, name = await asyncio.to_thread(encoded, value)
    kept = await keep(gateway.store, data)
    try:
        return await _submitted(gateway, caller, place, kind, name, kept)
    except Refused as error:
        if error.status not in (400, 404):
            raise
        # Where it is the model or the number that is wrong, this is refused in the same words.
        return await _submitted(gateway, caller, place, kind, name, Content(), _failure(error))


async def submit_failed(
    gateway: Gateway, caller: Identity, place: Place, kind: OperationKind, sent: bytes, error: Refused
) -> dict[str, Any]:
    """The same for what is not allowed: the future fails with the words of `error`."""
    name = (await asyncio.to_thread(hashlib.sha256, sent)).hexdigest()
    return await _submitted(gateway, caller, place, kind, name, Content(), _failure(error))


def encoded(value: Payload) -> tuple[bytes, str]:
    """The payload's bytes and their digest. Blocks."""
    data = encode(value)
    return data, digest(data)


def _failure(error: Refused) -> Failure:
    return Failure(message=str(error)[:MAX_MESSAGE], category="user")


async def _submitted(
    gateway: Gateway,
    caller: Identity,
    place: Place,
    kind: OperationKind,
    digest: str,
    payload: Content,
    failure: Failure | None = None,
) -> dict[str, Any]:
    request = Submit(
        tenant=caller.tenant,
        actor=caller.actor,
        model_id=place.model_id,
        seq_id=place.seq_id,
        kind=kind,
        digest=digest,
        payload=payload,
        failure=failure,
    )
    return future(await gateway.operations.submit(request))


def future(view: OperationView) -> dict[str, Any]:
    return {"request_id": view.request_id} | ({"model_id": view.model_id} if view.model_id is not None else {})


async def _train(request: Request, gateway: Gateway, caller: Identity, forward_only: bool) -> dict[str, Any]:
    settings = gateway.settings
    body = await whole(request, settings.gateway_max_json_bytes)
    async with few(gateway, len(body)):
        asked = await asyncio.to_thread(_asked, body, is_protobuf(request), forward_only, settings.gateway_max_data)
        kind: OperationKind = "forward" if asked.forward_only else "forward_backward"
        return await submit_read(
            gateway, caller, _place(asked), kind, body, lambda: asked.payload(settings.gateway_max_numbers)
        )


def _asked(body: bytes, protobuf: bool, forward_only: bool, max_data: int) -> Asked:
    if protobuf:
        return proto_wire.asked_proto(body, forward_only, max_data)
    return json_wire.asked(body, forward_only, max_data)


def _place(asked: Asked) -> Place:
    try:
        return Place(model_id=asked.model_id, seq_id=asked.seq_id)
    except ValidationError as error:
        raise Invalid(explain(error)) from error


def _adam(body: OptimStep) -> AdamPayload:
    if body.optimizer_params is not None:
        raise unsupported(f"the optimizer {str(body.optimizer_params.get('type'))[:40]!r}", "send adam_params")
    if body.adam_params is None:
        raise invalid("adam_params: is required")
    try:
        params = AdamParams.model_validate(body.adam_params)
    except ValidationError as error:
        raise invalid("; ".join(f"adam_params.{line}" for line in explain(error))) from error
    return AdamPayload(**{name: float(value) for name, value in params.model_dump().items()})
