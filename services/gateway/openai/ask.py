"""From a validated request to what is asked of the sampler: prompts as tokens, lengths, settings.

In: the request's fields and its target. Out: an `Ask`. Raises BadField with the numbers for what does
not fit the base model.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

from services.gateway.edge import Gateway
from services.gateway.errors import BadField
from services.gateway.openai.context import context_tokens
from services.gateway.openai.declared import require_structured_output, require_tools
from services.gateway.openai.generate import Ask
from services.gateway.openai.structured import grammar_of
from services.gateway.openai.tools import ToolUse, tool_use
from services.gateway.openai.wire import ChatRequest, CompletionRequest, SamplingFields
from services.gateway.resolution import Target
from shared.engine.port import Grammar, SamplingSettings
from shared.text.codec import TextCodec, TooLong
from shared.text.tools import CALL_BEGIN

__all__ = ["MAX_ENTRIES", "chat_ask", "completion_ask"]

MAX_ENTRIES = 1 << 22


async def chat_ask(gateway: Gateway, body: ChatRequest, target: Target, request_id: str) -> Ask:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadField("top_logprobs", "top_logprobs needs logprobs: true")
    codec = gateway.codecs[target.base.name]
    tools = await _tools(body)
    grammar = await _grammar(gateway, body, target, tools)
    _check_choices(gateway, 1, body.n)
    context = context_tokens(gateway, target.base)
    messages = [message.as_template_input() for message in body.messages]
    shown, begin = (tools.shown, CALL_BEGIN if tools.forced else "") if tools else ((), "")
    try:
        prompt = tuple(await asyncio.to_thread(codec.chat_ids, messages, shown, begin, context))
    except TooLong as error:
        raise _too_long("messages", error, context) from error
    except ValueError as error:
        raise BadField("messages", f"{target.base.name} does not take this chat: {error}") from error
    room = context - len(prompt)
    limit = body.limit if body.limit is not None else max(1, min(room, gateway.settings.gateway_default_max_tokens))
    _check_length("messages", len(prompt), limit, context)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    settings = replace(_settings(body, codec, limit, logprobs, None), grammar=grammar)
    return replace(_ask(gateway, body, target, request_id, (prompt,), settings), tools=tools)


async def completion_ask(gateway: Gateway, body: CompletionRequest, target: Target, request_id: str) -> Ask:
    if body.max_tokens == 0 and not body.echo:
        raise BadField("max_tokens", "max_tokens is 0; it must be at least 1 unless echo is true")
    codec = gateway.codecs[target.base.name]
    grammar = await _grammar(gateway, body, target, None)
    _check_choices(gateway, len(body.prompts), body.n)
    context = context_tokens(gateway, target.base)
    prompts = await asyncio.to_thread(_prompts, codec, body, context)
    settings = _settings(body, codec, body.max_tokens, body.logprobs, body.logprobs if body.echo else None)
    settings = replace(settings, grammar=grammar)
    return _ask(gateway, body, target, request_id, prompts, settings, body.echo)


async def _tools(body: ChatRequest) -> ToolUse | None:
    if not body.tools:
        return tool_use((), body.tool_choice, body.parallel_tool_calls)
    # Schemas take a while to check.
    return await asyncio.to_thread(tool_use, body.tools, body.tool_choice, body.parallel_tool_calls)


async def _grammar(gateway: Gateway, body: SamplingFields, target: Target, tools: ToolUse | None) -> Grammar | None:
    """What the completion must follow. Raises BadField also for what no live replica of the base declares."""
    grammar = None
    if body.response_format is not None or body.structured_outputs is not None:
        grammar = await asyncio.to_thread(grammar_of, body.response_format, body.structured_outputs)
    param = "structured_outputs" if body.structured_outputs is not None else "response_format"
    if grammar is not None and tools is not None:
        raise BadField(param, f"{param} and tools cannot hold for one answer; send one, or tool_choice: none")
    replicas = gateway.replicas.replicas(target.base.name)
    if tools is not None:
        require_tools(replicas, "tools")
    if tools is not None and tools.forced is not None:
        grammar, param = tools.forced, "tool_choice"
    if grammar is not None:
        require_structured_output(replicas, param)
    return grammar


def _check_choices(gateway: Gateway, prompts: int, n: int) -> None:
    most = gateway.settings.gateway_max_choices
    if prompts * n > most:
        raise BadField("n", f"{prompts} prompts with n {n} are {prompts * n} choices; at most {most} are allowed")


def _too_long(param: str, error: TooLong, context: int) -> BadField:
    return BadField(param, f"{error}; this model's context is {context} tokens", "context_length_exceeded")


def _prompts(codec: TextCodec, body: CompletionRequest, context: int) -> tuple[tuple[int, ...], ...]:
    prompts = []
    for prompt in body.prompts:
        ids = _encoded(codec, prompt, context) if isinstance(prompt, str) else prompt
        # Before anything else is made of what may be far too long.
        _check_length("prompt", len(ids), max(1, body.max_tokens), context)
        if not ids:
            raise BadField("prompt", "an empty prompt has no token to continue from; send at least one character")
        wrong = next((token for token in ids if not 0 <= token < codec.vocab_size), None)
        if wrong is not None:
            raise BadField("prompt", f"token id {wrong} is outside 0 to {codec.vocab_size - 1}")
        prompts.append(tuple(ids))
    return tuple(prompts)


def _encoded(codec: TextCodec, text: str, context: int) -> list[int]:
    try:
        return codec.encode(text, add_special=True, room=context)
    except TooLong as error:
        raise _too_long("prompt", error, context) from error
    except ValueError as error:
        raise BadField("prompt", f"the prompt is no text: {error}") from error


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
    ask = Ask(
        # Clients may send one X-Request-Id twice; engines take no id twice.
        request_id=f"{request_id}-{secrets.token_hex(4)}",
        target=target,
        prompts=tuple(prompts),
        settings=settings,
        n=body.n,
        seed=body.seed,
        stops=body.stop,
        echo=echo,
        priority=body.priority,
    )
    _check_answer(ask)
    return ask


def _check_answer(ask: Ask) -> None:
    """Raises BadField for an answer with more tokens, alternatives included, than may be held for one request."""
    tokens = ask.choices * ask.settings.max_tokens + ask.echo * ask.n * sum(map(len, ask.prompts))
    asked = ask.settings.logprobs
    entries = tokens * (1 if asked is None else 1 + asked)
    if entries > MAX_ENTRIES:
        raise BadField(
            "n" if asked is None else "logprobs",
            f"{ask.choices} choices may have {tokens} tokens, {entries} with their alternatives; "
            f"at most {MAX_ENTRIES} are allowed in one answer; send fewer prompts, a lower n or max_tokens",
        )
