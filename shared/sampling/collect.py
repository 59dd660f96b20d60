"""Chunks → whole sequences: the same rule for every caller that does not stream."""

from __future__ import annotations

from shared.engine.port import SampleRequest
from shared.errors import Retryable
from shared.sampling.port import Sampled, SampleStream, Sequence

__all__ = ["collect"]


async def collect(stream: SampleStream, request: SampleRequest) -> Sampled:
    """All n sequences. Raises Retryable when the stream ends before each has finished, and when a
    sequence lacks the logprobs that were asked for."""
    tokens: list[list[int]] = [[] for _ in range(request.n)]
    logprobs: list[list[float]] = [[] for _ in range(request.n)]
    finish: list[str | None] = [None] * request.n
    prompt_logprobs: tuple[float | None, ...] | None = None
    async for chunk in stream.chunks:
        tokens[chunk.index].extend(chunk.token_ids)
        logprobs[chunk.index].extend(chunk.logprobs or ())
        finish[chunk.index] = chunk.finish_reason or finish[chunk.index]
        prompt_logprobs = chunk.prompt_logprobs or prompt_logprobs
    asked = request.settings.logprobs is not None
    sequences = []
    for index, reason in enumerate(finish):
        if reason is None or reason == "abort":
            raise Retryable(f"sequence {index} of request {request.request_id} ended early ({reason}); ask again")
        if asked and len(logprobs[index]) != len(tokens[index]):
            raise Retryable(f"sequence {index} of request {request.request_id} came without all its logprobs")
        sequences.append(Sequence(tuple(tokens[index]), tuple(logprobs[index]) if asked else None, reason))
    return Sampled(stream.served, tuple(sequences), prompt_logprobs)
