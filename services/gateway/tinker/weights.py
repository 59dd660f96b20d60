"""Saving a model's weights and loading saved ones.

In: a name or a `tinker://` path. Out: a future. Rules: a name is saved under the model it belongs to; a sampler save
without a name is ephemeral and belongs to the sampling session whose number it brings; loading goes onto a model, or
begins a new one whose base and shape are the checkpoint's.
"""

from __future__ import annotations

from typing import Any

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.identity import Identity
from services.gateway.tinker.errors import invalid, unsupported
from services.gateway.tinker.messages import (
    LoadWeights,
    Place,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from services.gateway.tinker.models import begun, check_optimizer
from services.gateway.tinker.operations import submit_failed, submit_read
from services.gateway.tinker.rest.paths import checked_name, parse_path
from services.gateway.tinker.sessions import texts
from shared.catalog.operations import NewModel
from shared.operations.payload import LoadPayload, SavePayload

__all__ = ["load_weights", "save_weights", "save_weights_external", "save_weights_for_sampler"]

MAX_TTL_S = 10 * 366 * 24 * 3600


async def save_weights(body: SaveWeights, gateway: Here, caller: Caller) -> dict[str, Any]:
    def content() -> SavePayload:
        _check_metadata(body.user_metadata)
        if body.path is None:
            raise invalid("path: is required; it is the name of the checkpoint")
        name = checked_name(body.path, "checkpoint name")
        return SavePayload("weights", name, _ttl(body.ttl_seconds), body.overwrite)

    place = Place(model_id=body.model_id, seq_id=body.seq_id)
    return await submit_read(gateway, caller, place, "save_weights", body.model_dump_json().encode(), content)


async def save_weights_for_sampler(body: SaveWeightsForSampler, gateway: Here, caller: Caller) -> dict[str, Any]:
    def content() -> SavePayload:
        _check_metadata(body.user_metadata)
        if body.kind != "snapshot":
            raise unsupported(f"a sampler save of kind {body.kind[:40]!r}", "use snapshot")
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise invalid("exactly one of path (a named save) and sampling_session_seq_id (an ephemeral one) is needed")
        name = "" if body.path is None else checked_name(body.path, "checkpoint name")
        ttl = _ttl(body.ttl_seconds)
        return SavePayload("sampler_weights", name, ttl, sampling_session_seq_id=body.sampling_session_seq_id)

    place = Place(model_id=body.model_id, seq_id=body.seq_id)
    return await submit_read(gateway, caller, place, "save_sampler_weights", body.model_dump_json().encode(), content)


async def save_weights_external(body: SaveWeightsExternal, gateway: Here, caller: Caller) -> dict[str, Any]:
    """It fails, and its number is used."""
    place = Place(model_id=body.model_id, seq_id=body.seq_id)
    refused = unsupported("save_weights_external", "GET …/archive has every saved checkpoint as a PEFT directory")
    return await submit_failed(gateway, caller, place, "save_weights", body.model_dump_json().encode(), refused)


async def load_weights(body: LoadWeights, gateway: Here, caller: Caller) -> dict[str, Any]:
    onto, begins = (body.model_id, body.seq_id), (body.session_id, body.model_seq_id)
    if None not in onto and begins == (None, None):
        assert body.model_id is not None
        assert body.seq_id is not None
        place = Place(model_id=body.model_id, seq_id=body.seq_id)
        sent = body.model_dump_json().encode()
        return await submit_read(gateway, caller, place, "load_weights", sent, lambda: _load(body))
    if None not in begins and onto == (None, None):
        return await _begin_from(body, gateway, caller)
    raise invalid("send model_id with seq_id, or session_id with model_seq_id, and not both")


async def _begin_from(body: LoadWeights, gateway: Gateway, caller: Identity) -> dict[str, Any]:
    _check_access(body)
    check_optimizer(body.optimizer_config)
    assert body.session_id is not None
    assert body.model_seq_id is not None
    path = str(parse_path(body.path))
    saved = await gateway.operations.resolve_path(path, caller.tenant)
    if body.base_model is not None and body.base_model != saved.base:
        raise invalid(f"base_model: {path} is of {saved.base}, not of {body.base_model[:200]}")
    return await begun(
        gateway,
        NewModel(
            tenant=caller.tenant,
            actor=caller.actor,
            session_id=checked_name(body.session_id, "session id"),
            model_seq_id=body.model_seq_id,
            base=saved.base,
            lora=saved.lora,
            train_unembed=saved.train_unembed,
            user_metadata=texts(body.user_metadata),
            path=path,
            optimizer=body.optimizer,
        ),
    )


def _load(body: LoadWeights) -> LoadPayload:
    _check_access(body)
    if body.base_model is not None or body.user_metadata is not None or body.optimizer_config is not None:
        raise invalid("base_model, user_metadata and optimizer_config belong to a new model; send session_id for one")
    return LoadPayload(str(parse_path(body.path)), body.optimizer)


def _check_access(body: LoadWeights) -> None:
    if body.weights_access_token is not None:
        raise unsupported("weights_access_token", "publish the checkpoint to let others read it")


def _check_metadata(metadata: dict[str, Any] | None) -> None:
    if metadata:
        raise unsupported("user_metadata of a checkpoint", "put it into the model's user_metadata")


def _ttl(seconds: int | None) -> float | None:
    if seconds is not None and not 1 <= seconds <= MAX_TTL_S:
        raise invalid(f"ttl_seconds: {seconds} is not allowed; it is 1 to {MAX_TTL_S}, or left out for no expiry")
    return None if seconds is None else float(seconds)
