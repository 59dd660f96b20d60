"""POST /v1/completions, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.gateway.edge import Caller, Here, request_id
from services.gateway.openai.answer import envelope, finite, proof_headers, sse, usage
from services.gateway.openai.ask import completion_ask
from services.gateway.openai.choice import Piece, Token
from services.gateway.openai.generate import Generation
from services.gateway.openai.run import opened
from services.gateway.openai.wire import CompletionRequest, refuse_unsupported
from services.gateway.streaming import EventStream, until_disconnect
from shared.text.codec import TextCodec

__all__ = ["completions"]


async def completions(request: Request, body: CompletionRequest, gateway: Here, caller: Caller) -> Response:
    refuse_unsupported(body)
    target = await gateway.resolver.target(body.model, caller)
    ask = await completion_ask(gateway, body, target, request_id(request))
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


async def _whole(generation: Generation, body: CompletionRequest, codec: TextCodec) -> dict[str, Any]:
    pieces: list[list[Piece]] = [[] for _ in range(generation.ask.choices)]
    async for choice, piece in generation.pieces():
        pieces[choice].append(piece)
    choices = [
        _choice(
            index,
            Piece(
                "".join(piece.text for piece in found),
                tuple(token for piece in found for token in piece.tokens),
                found[-1].finish_reason,
            ),
            body,
            codec,
        )
        for index, found in enumerate(pieces)
    ]
    head = envelope("text_completion", "cmpl", generation.ask.target, generation.served)
    return head | {"choices": choices, "usage": usage(generation)}


async def _chunks(generation: Generation, body: CompletionRequest, codec: TextCodec) -> AsyncIterator[dict[str, Any]]:
    head = envelope("text_completion", "cmpl", generation.ask.target, generation.served)
    if body.include_usage:
        head["usage"] = None
    async for index, piece in generation.pieces():
        yield head | {"choices": [_choice(index, piece, body, codec)]}
    if body.include_usage:
        yield head | {"choices": [], "usage": usage(generation)}


def _choice(index: int, piece: Piece, body: CompletionRequest, codec: TextCodec) -> dict[str, Any]:
    return {
        "index": index,
        "text": piece.text,
        "logprobs": None if body.logprobs is None else _logprobs(piece.tokens, body.logprobs, codec),
        "finish_reason": piece.finish_reason,
    }


def _logprobs(tokens: Sequence[Token], most: int, codec: TextCodec) -> dict[str, Any]:
    return {
        "tokens": [codec.token_text(token.id) for token in tokens],
        "token_logprobs": [None if token.logprob is None else finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(token, most, codec) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _top(token: Token, most: int, codec: TextCodec) -> dict[str, float] | None:
    """The likeliest, and the token itself, so that up to `most` + 1 entries; None where it has no logprob."""
    if token.logprob is None:
        return None
    likeliest = sorted((token.top or {}).items(), key=lambda item: -item[1])[:most]
    found: dict[str, float] = {}
    # Parts of characters share a text: the token itself and the likelier one keep it.
    for token_id, logprob in [(token.id, token.logprob), *likeliest]:
        found.setdefault(codec.token_text(token_id), finite(logprob))
    return found
