"""From a validated request to what is asked of the sampler: prompts as tokens, lengths, settings.

In: the request's fields and its target. Out: an `Ask`. Raises BadField with the numbers for what does
not fit the base model.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from services.gateway.edge import Gateway
from services.gateway.errors import BadField
from services.gateway.openai.generate import Ask
from services.gateway.openai.wire import ChatRequest, CompletionRequest, SamplingFields
from services.gateway.resolution import Target
from shared.engine.port import SamplingSettings
from shared.text.codec import TextCodec

__all__ = ["chat_ask", "completion_ask"]


async def chat_ask(gateway: Gateway, body: ChatRequest, target: Target, request_id: str) -> Ask:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadField("top_logprobs", "top_logprobs needs logprobs: true")
    codec = gateway.codecs[target.base.name]
    messages = [message.as_template_input() for message in body.messages]
    try:
        prompt = tuple(await asyncio.to_thread(codec.chat_ids, messages))
    except ValueError as error:
        raise BadField("messages", f"{target.base.name} does not take this chat: {error}") from error
    context = _context(gateway, target)
    room = context - len(prompt)
    limit = body.limit if body.limit is not None else max(1, min(room, gateway.settings.gateway_default_max_tokens))
    _check_length("messages", len(prompt), limit, context)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    settings = _settings(body, codec, limit, logprobs, None)
    return _ask(gateway, body, target, request_id, (prompt,), settings)


async def completion_ask(gateway: Gateway, body: CompletionRequest, target: Target, request_id: str) -> Ask:
    if body.max_tokens == 0 and not body.echo:
        raise BadField("max_tokens", "max_tokens is 0; it must be at least 1 unless echo is true")
    codec = gateway.codecs[target.base.name]
    prompts = await asyncio.to_thread(_prompts, codec, body)
    context = _context(gateway, target)
    for prompt in prompts:
        _check_length("prompt", len(prompt), max(1, body.max_tokens), context)
    settings = _settings(body, codec, body.max_tokens, body.logprobs, body.logprobs if body.echo else None)
    return _ask(gateway, body, target, request_id, prompts, settings, body.echo)


def _context(gateway: Gateway, target: Target) -> int:
    """What every replica of the base takes, in tokens; engines may be set to less than the model's own."""
    said = [replica.max_context for replica in gateway.replicas.replicas(target.base.name)]
    return min([target.base.max_context, *(tokens for tokens in said if tokens is not None)])


def _prompts(codec: TextCodec, body: CompletionRequest) -> tuple[tuple[int, ...], ...]:
    prompts = []
    for prompt in body.prompts:
        ids = codec.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt
        if not ids:
            raise BadField("prompt", "an empty prompt has no token to continue from; send at least one character")
        wrong = next((token for token in ids if not 0 <= token < codec.vocab_size), None)
        if wrong is not None:
            raise BadField("prompt", f"token id {wrong} is outside 0 to {codec.vocab_size - 1}")
        prompts.append(tuple(ids))
    return tuple(prompts)


def _check_length(param: str, prompt: int, limit: int, context: int) -> None:
    if prompt + limit > context:
        raise BadField(
            param,
            f"the prompt has {prompt} tokens and {limit} more may be generated, {prompt + limit} in all; "
            f"this model's context is {context} tokens",
            "context_length_exceeded",
        )


def _settings(
    body: SamplingFields, codec: TextCodec, limit: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingSettings:
    wrong = next((token for token in body.logit_bias if not 0 <= token < codec.vocab_size), None)
    if wrong is not None:
        raise BadField("logit_bias", f"token id {wrong} is outside 0 to {codec.vocab_size - 1}")
    return SamplingSettings(
        max_tokens=limit,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k or -1,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=dict(body.logit_bias),
        stop_token_ids=codec.eos_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _ask(
    gateway: Gateway,
    body: SamplingFields,
    target: Target,
    request_id: str,
    prompts: Sequence[tuple[int, ...]],
    settings: SamplingSettings,
    echo: bool = False,
) -> Ask:
    # Clients may send one X-Request-Id twice; engines take no id twice.
    ask = Ask(
        f"{request_id}-{secrets.token_hex(4)}", target, tuple(prompts), settings, body.n, body.seed, body.stop, echo
    )
    most = gateway.settings.gateway_max_choices
    if ask.choices > most:
        raise BadField(
            "n", f"{len(prompts)} prompts with n {body.n} are {ask.choices} choices; at most {most} are allowed"
        )
    return ask
