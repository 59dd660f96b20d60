"""What the chat and completions answers share: ids, proof headers, usage, logprobs without infinity."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from services.gateway.errors import openai_answer, problem_of
from services.gateway.openai.generate import Generation
from services.gateway.resolution import Target
from services.gateway.streaming import event
from shared.sampling.port import Served

__all__ = ["envelope", "finite", "fingerprint", "proof_headers", "sse", "usage"]

NEGATIVE_INFINITY = -9999.0


def envelope(kind: str, prefix: str, target: Target, served: Served) -> dict[str, Any]:
    """The head of an answer; `model` is the reference that was asked for."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": target.asked,
        "system_fingerprint": fingerprint(served),
    }


def fingerprint(served: Served) -> str:
    """What ran: the first digits of the adapter's digest (the base's, for the base) and the engine."""
    return f"{(served.adapter_sha256 or served.base_sha256)[:12]}/{served.engine}"


def proof_headers(target: Target, served: Served) -> dict[str, str]:
    headers = {"mint-base": served.base.encode("ascii", "replace").decode()}
    if served.revision is not None:
        headers["mint-revision"] = served.revision
    if served.adapter_sha256 is not None:
        headers["mint-adapter-sha256"] = served.adapter_sha256
    if target.stale:
        headers["mint-resolution"] = "stale"
    return headers


def usage(generation: Generation) -> dict[str, int]:
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def finite(logprob: float) -> float:
    """JSON has no infinity: a token that filters ruled out has -9999.0, as OpenAI's API says it."""
    return logprob if math.isfinite(logprob) else NEGATIVE_INFINITY


async def sse(chunks: AsyncIterator[dict[str, Any]], request_id: str) -> AsyncIterator[str]:
    """Data events and the closing `[DONE]`; a failure midway is an error event, and then no `[DONE]`."""
    try:
        async for chunk in chunks:
            yield event(chunk)
    except Exception as error:
        yield event(bytes(openai_answer(problem_of(error, request_id)).body).decode())
        return
    yield event("[DONE]")
