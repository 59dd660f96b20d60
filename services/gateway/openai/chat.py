"""POST /v1/chat/completions, whole and streamed."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.gateway.edge import Caller, Here, request_id
from services.gateway.openai.answer import envelope, finite, proof_headers, sse, usage
from services.gateway.openai.ask import chat_ask
from services.gateway.openai.choice import Piece, Token, ToolCall
from services.gateway.openai.generate import Generation
from services.gateway.openai.run import opened
from services.gateway.openai.wire import ChatRequest, refuse_unsupported
from services.gateway.streaming import EventStream, until_disconnect
from shared.text.codec import TextCodec

__all__ = ["chat_completions"]


async def chat_completions(request: Request, body: ChatRequest, gateway: Here, caller: Caller) -> Response:
    refuse_unsupported(body)
    target = await gateway.resolver.target(body.model, caller)
    ask = await chat_ask(gateway, body, target, request_id(request))
    generation = await opened(request, gateway, ask)
    codec = gateway.codecs[target.base.name]
    headers = proof_headers(target, generation.served)
    if body.stream:
        events = sse(_chunks(generation, body, codec), request_id(request))
        return EventStream(events, headers, generation.close)
    try:
        answer = await until_disconnect(request, _whole(generation, body, codec))
    finally:
        await generation.close()
    return JSONResponse(answer, headers=headers)


async def _whole(generation: Generation, body: ChatRequest, codec: TextCodec) -> dict[str, Any]:
    pieces: list[list[Piece]] = [[] for _ in range(generation.ask.choices)]
    async for choice, piece in generation.pieces():
        pieces[choice].append(piece)
    head = envelope("chat.completion", "chatcmpl", generation.ask.target, generation.served)
    choices = [
        {
            "index": index,
            "message": _message(head["id"], index, found),
            "logprobs": _logprobs([token for piece in found for token in piece.tokens], body, codec),
            "finish_reason": found[-1].finish_reason,
        }
        for index, found in enumerate(pieces)
    ]
    return head | {"choices": choices, "usage": usage(generation)}


def _message(answer_id: str, choice: int, pieces: list[Piece]) -> dict[str, Any]:
    """Content is null where there are calls and nothing else."""
    text = "".join(piece.text for piece in pieces)
    calls = [call for piece in pieces for call in piece.calls]
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
    if calls:
        message["tool_calls"] = [_call(answer_id, choice, number, call) for number, call in enumerate(calls)]
    return message


async def _chunks(generation: Generation, body: ChatRequest, codec: TextCodec) -> AsyncIterator[dict[str, Any]]:
    head = envelope("chat.completion.chunk", "chatcmpl", generation.ask.target, generation.served)
    called = [0] * generation.ask.choices
    if body.include_usage:
        head["usage"] = None
    for index in range(generation.ask.choices):
        yield head | {"choices": [_delta(index, {"role": "assistant", "content": "", "refusal": None})]}
    async for index, piece in generation.pieces():
        if piece.text or piece.tokens:
            logprobs = _logprobs(piece.tokens, body, codec)
            yield head | {"choices": [_delta(index, {"content": piece.text}, logprobs)]}
        for call in piece.calls:
            number, called[index] = called[index], called[index] + 1
            delta = {"tool_calls": [{"index": number, **_call(head["id"], index, number, call)}]}
            yield head | {"choices": [_delta(index, delta)]}
        if piece.finish_reason is not None:
            yield head | {"choices": [_delta(index, {}, None, piece.finish_reason)]}
    if body.include_usage:
        yield head | {"choices": [], "usage": usage(generation)}


def _call(answer_id: str, choice: int, number: int, call: ToolCall) -> dict[str, Any]:
    """The id follows from the answer's and the place of the call in it."""
    digest = hashlib.sha256(f"{answer_id}|{choice}|{number}".encode()).hexdigest()
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{digest[:24]}", "type": "function", "function": function}


def _delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(tokens: list[Token] | tuple[Token, ...], body: ChatRequest, codec: TextCodec) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    most = body.top_logprobs or 0
    content = []
    for token in tokens:
        top = sorted((token.top or {}).items(), key=lambda item: -item[1])[:most]
        content.append(
            _entry(codec, token.id, token.logprob) | {"top_logprobs": [_entry(codec, *item) for item in top]}
        )
    return {"content": content, "refusal": None}


def _entry(codec: TextCodec, token: int, logprob: float | None) -> dict[str, Any]:
    """`bytes` is null for a token that is only part of a character."""
    text = codec.token_text(token)
    return {
        "token": text,
        "logprob": finite(logprob if logprob is not None else float("-inf")),
        "bytes": None if "\ufffd" in text else list(text.encode()),
    }
