"""The mint extension `forward_backward_reverse_kl`: an operation of its model like forward_backward.

In: JSON of `mint`'s client. Out: a future. Invariant: content that is not allowed still uses its number, so that what
comes behind it need not wait.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Header
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.identity import Identity
from services.gateway.tinker.body import few, message, whole
from services.gateway.tinker.errors import invalid
from services.gateway.tinker.json_wire import prompt_tokens, tensor, tensor_json, too_many
from services.gateway.tinker.messages import Place, SeqId
from services.gateway.tinker.operations import encoded, future, submit, submit_failed
from services.gateway.tinker.rest.paths import checked_name, parse_path
from services.gateway.tinker.tensors import Budget, dense, token_ids
from shared.catalog.operations import Submit
from shared.errors import Refused
from shared.operations.content import keep
from shared.operations.payload import Array, KlRow, ReverseKlPayload, ReverseKlResult

__all__ = ["ReverseKlRequest", "forward_backward_reverse_kl", "reverse_kl_json"]


class KlDatum(BaseModel):
    """`target_tokens` and `weights` have a number for each token of `student_input`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    student_input: dict[str, Any]
    reference_input: dict[str, Any]
    target_tokens: dict[str, Any]
    weights: dict[str, Any]


class ReverseKlRequest(BaseModel):
    """Without `seq_id`: behind what is accepted so far, beside the numbers that the client counts."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())
    model_id: Annotated[str, Field(max_length=300)]
    reference_model_path: Annotated[str, Field(max_length=1000)]
    data: list[KlDatum]
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    seq_id: SeqId | None = None
    type: Literal["mint_forward_backward_reverse_kl"] = "mint_forward_backward_reverse_kl"


async def forward_backward_reverse_kl(
    request: Request,
    gateway: Here,
    caller: Caller,
    x_idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> dict[str, Any]:
    sent = await whole(request, gateway.settings.gateway_max_json_bytes)
    async with few(gateway, len(sent)):
        body = await asyncio.to_thread(message, sent, ReverseKlRequest)
        return await _submitted(gateway, caller, body, sent, x_idempotency_key or "")


async def _submitted(
    gateway: Gateway, caller: Identity, body: ReverseKlRequest, sent: bytes, key: str
) -> dict[str, Any]:
    model_id = checked_name(body.model_id, "training run")
    if len(body.data) > gateway.settings.gateway_max_data:
        raise too_many(gateway.settings.gateway_max_data)
    place = None if body.seq_id is None else Place(model_id=model_id, seq_id=body.seq_id)
    try:
        payload = await asyncio.to_thread(_payload, body, gateway.settings.gateway_max_numbers)
    except Refused as error:
        if place is None:
            raise
        return await submit_failed(gateway, caller, place, "reverse_kl", sent, error)
    if place is None:
        return await _unnumbered(gateway, caller, model_id, payload, key)
    return await submit(gateway, caller, place, "reverse_kl", payload)


def reverse_kl_json(result: ReverseKlResult) -> dict[str, Any]:
    """What `retrieve_future` answers for a reverse KL: one loss a datum, in the order of the data."""
    losses = (np.array([loss], np.float32) for loss in result.losses)
    return {
        "outputs": [{"loss": tensor_json(loss)} for loss in losses],
        "metrics": dict(result.metrics),
        "type": "mint_forward_backward_reverse_kl",
    }


async def _unnumbered(
    gateway: Gateway, caller: Identity, model_id: str, payload: ReverseKlPayload, key: str
) -> dict[str, Any]:
    """Sent again under the same key it is the same operation."""
    data, name = await asyncio.to_thread(encoded, payload)
    request = Submit(
        tenant=caller.tenant,
        actor=caller.actor,
        model_id=model_id,
        seq_id=0,
        kind="reverse_kl",
        digest=name,
        payload=await keep(gateway.store, data),
        key=key,
    )
    return future(await gateway.operations.submit(request))


def _payload(body: ReverseKlRequest, max_numbers: int) -> ReverseKlPayload:
    reference, budget = str(parse_path(body.reference_model_path)), Budget(max_numbers)
    rows = tuple(_row(datum, f"data[{index}]", budget) for index, datum in enumerate(body.data))
    if not rows:
        raise invalid("data: there is none; send at least one datum")
    return ReverseKlPayload(rows, reference, body.temperature)


def _row(datum: KlDatum, where: str, budget: Budget) -> KlRow:
    student = _tokens(datum.student_input, f"{where}.student_input", budget)
    reference = _tokens(datum.reference_input, f"{where}.reference_input", budget)
    targets = _targets(datum.target_tokens, f"{where}.target_tokens", budget)
    weights = dense(tensor(datum.weights, f"{where}.weights"), f"{where}.weights", budget).astype("<f4")
    for name, array in (("target_tokens", targets), ("weights", weights)):
        if array.shape != student.shape:
            raise invalid(
                f"{where}.{name}: its shape is {list(array.shape)}, that of student_input {list(student.shape)}"
            )
    return KlRow(student, reference, targets, weights)


def _tokens(found: Any, where: str, budget: Budget) -> Array:
    tokens = token_ids(prompt_tokens(found, where), where)
    if not tokens.size:
        raise invalid(f"{where}: there is no token")
    budget.take(tokens.size, where)
    return tokens


def _targets(found: dict[str, Any], where: str, budget: Budget) -> Array:
    """The client's tensor says float32 unless told otherwise, so that whole numbers count as what they are."""
    values = dense(tensor(found, where), where, budget)
    if values.dtype.kind == "f" and (values != np.floor(values)).any():
        raise invalid(f"{where}: token ids are whole numbers; send dtype int64")
    return token_ids(values.astype("<i8"), where)
