"""Sampling sessions and samples.

In: a base model or a saved path to sample from; then prompts with how to draw. Out: a sampler's id; futures, each with
the ids of the sequences it will have. Rules: `stop` left out ends at the base's end-of-sequence tokens, `[]` at nothing
but `max_tokens`; what the protocol has and this server has not is refused by name. Invariant: the samples of a session
are told apart by the numbers that its clients give, from 0.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from fastapi import Path
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.identity import Identity
from services.gateway.tinker.body import beside, few, message, whole
from services.gateway.tinker.errors import invalid, unsupported
from services.gateway.tinker.json_wire import prompt_tokens
from services.gateway.tinker.messages import CreateSamplingSession, FutureRef, Sample, SamplingParams
from services.gateway.tinker.models import named_base
from services.gateway.tinker.operations import encoded, future
from services.gateway.tinker.rest.paths import checked_name, parse_path
from services.gateway.tinker.sessions import said_by
from services.gateway.tinker.tensors import token_ids
from shared.catalog.operations import NewSampler, SubmitSample
from shared.operations.content import keep
from shared.operations.payload import Array, SamplePayload

__all__ = ["asample", "cancel_future", "create_sampling_session", "get_sampler"]

MAX_STOPS = 64
MAX_STOP_CHARS = 1000


async def create_sampling_session(body: CreateSamplingSession, gateway: Here, caller: Caller) -> dict[str, Any]:
    """From `model_path`, else from `base_model` itself; of both, the base must be the path's."""
    base, path = _source(gateway, body.base_model, body.model_path)
    sampler = await gateway.operations.new_sampler(
        NewSampler(
            tenant=caller.tenant,
            actor=caller.actor,
            session_id=checked_name(body.session_id, "session id"),
            sampling_session_seq_id=body.sampling_session_seq_id,
            base=base,
            path=path,
        )
    )
    if base is not None and sampler.base != base:
        raise invalid(f"base_model: {path} is of {sampler.base}, not of {base}")
    return {"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id}


async def get_sampler(
    sampler_id: Annotated[str, Path(max_length=300)], gateway: Here, caller: Caller
) -> dict[str, Any]:
    """`revision` and `adapter_sha256` say what it samples with; without them, the base itself."""
    sampler = await gateway.operations.sampler(checked_name(sampler_id, "sampler id"), caller.tenant)
    found = {"model_path": sampler.path, "revision": sampler.revision, "adapter_sha256": sampler.adapter_sha256}
    known = {name: value for name, value in found.items() if value is not None}
    return {"sampler_id": sampler.sampler_id, "base_model": sampler.base} | known


async def asample(request: Request, gateway: Here, caller: Caller) -> dict[str, Any]:
    """429 where the tenant has too many samples open."""
    sent = await whole(request, gateway.settings.gateway_max_json_bytes)
    async with few(gateway, len(sent)):
        body = await beside(len(sent), lambda: message(sent, Sample))
        return await _asample(body, len(sent), gateway, caller)


async def _asample(body: Sample, size: int, gateway: Gateway, caller: Identity) -> dict[str, Any]:
    """`size`: of what was sent, in bytes."""
    _check_offered(body)
    most = gateway.settings.gateway_max_choices
    if body.num_samples > most:
        raise invalid(f"num_samples: {body.num_samples} is more than {most}, which is what is allowed")
    tenant, session, base, path = caller.tenant, None, None, None
    if body.sampling_session_id is not None:
        session = checked_name(body.sampling_session_id, "sampling session id")
        if body.base_model is not None or body.model_path is not None:
            raise invalid("sampling_session_id says what to sample from; leave base_model and model_path out")
        if body.seq_id is None:
            raise invalid("seq_id: is required with sampling_session_id")
    else:
        base, path = _source(gateway, body.base_model, body.model_path)
        tenant = tenant or gateway.settings.gateway_local_tenant
    data, name = await beside(size, lambda: encoded(_payload(body)))
    view = await gateway.operations.submit_sample(
        SubmitSample(
            tenant=tenant,
            actor=caller.actor,
            sampling_session_id=session,
            base=base,
            path=path,
            # Without a session nobody counts, and a request sent again is another one.
            seq_id=secrets.randbits(62) if body.seq_id is None else body.seq_id,
            digest=name,
            payload=await keep(gateway.store, data),
        )
    )
    ids = [f"{view.request_id}:{index}" for index in range(body.num_samples)]
    return future(view) | {"sample_sequence_ids": ids}


async def cancel_future(body: FutureRef, gateway: Here, caller: Caller) -> Response:
    """What nobody works on yet fails as cancelled; anything else stays as it is."""
    await gateway.operations.cancel(checked_name(body.request_id, "request id"), said_by(caller))
    return Response(status_code=204)


def _source(gateway: Gateway, base: str | None, path: str | None) -> tuple[str | None, str | None]:
    if base is None and path is None:
        raise invalid("one of base_model and model_path is needed")
    return (
        None if base is None else named_base(gateway, base).name,
        None if path is None else str(parse_path(path)),
    )


def _check_offered(body: Sample) -> None:
    for name, asked in (
        ("topk_sample_logprobs", body.topk_sample_logprobs != 0),
        ("target_prompt_logprobs", body.target_prompt_logprobs is not None),
        ("prompt_alt_tokens_k", body.prompt_alt_tokens_k != 0),
        ("prompt_logprobs_last_n", body.prompt_logprobs_last_n is not None),
        ("record_stability_info", bool(body.record_stability_info)),
    ):
        if asked:
            raise unsupported(name, "leave it out")


def _payload(body: Sample) -> SamplePayload:
    params = body.sampling_params
    prompt = _prompt(body.prompt)
    strings, tokens = _stops(params)
    return SamplePayload(
        prompt=prompt,
        num_samples=body.num_samples,
        max_tokens=params.max_tokens,
        seed=params.seed,
        stop_strings=strings,
        stop_tokens=tokens,
        temperature=float(params.temperature),
        top_k=params.top_k,
        top_p=float(params.top_p),
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        ignore_eos=params.stop == [],
    )


def _prompt(found: dict[str, Any]) -> Array:
    prompt = token_ids(prompt_tokens(found, "prompt"), "prompt")
    if not prompt.size:
        raise invalid("prompt: there is no token to continue from")
    return prompt


def _stops(params: SamplingParams) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Stop strings, or stop tokens."""
    given = params.stop
    if given is None:
        return (), ()
    stops = [given] if isinstance(given, str) else given
    if len(stops) > MAX_STOPS:
        raise invalid(f"sampling_params.stop: {len(stops)} are too many; at most {MAX_STOPS} are allowed")
    strings = tuple(stop for stop in stops if isinstance(stop, str))
    tokens = tuple(stop for stop in stops if isinstance(stop, int))
    if any(not stop or len(stop) > MAX_STOP_CHARS for stop in strings):
        raise invalid(f"sampling_params.stop: a stop string has 1 to {MAX_STOP_CHARS} characters")
    if any(not 0 <= stop < 2**31 for stop in tokens):
        raise invalid("sampling_params.stop: a stop token is a token id, 0 or more")
    return strings, tokens
