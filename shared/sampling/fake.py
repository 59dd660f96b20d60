"""A sampler without replicas, for tests of what samples: same request, same answer, in any process.

Each token is a hash of (revision, prompt, seed, sequence, position), so that a test sees at once when
a caller names the wrong revision or loses a seed; `reply` puts a chosen answer in its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from shared.engine.port import FinishReason, SampleChunk, SampleRequest
from shared.errors import Refused
from shared.sampling.port import Sampled, SampleStream, Sequence, Served

Reply = Callable[[SampleRequest, int], "tuple[int, ...]"]
"""(request, sequence index) → token ids; a reply shorter than max_tokens finishes with `stop`."""


class FakeSampler:
    """`adapters` (revision → adapter_sha256) names the revisions that exist; None = every one does.
    Errors queued in `failures` are raised first, one a call. `requests` keeps all that was asked."""

    def __init__(
        self, reply: Reply | None = None, adapters: dict[str, str] | None = None, base_sha256: str = "0" * 64
    ) -> None:
        self.reply: Reply = reply or hashed_tokens
        self.adapters = adapters
        self.base_sha256 = base_sha256
        self.requests: list[SampleRequest] = []
        self.failures: list[Exception] = []
        self.open_streams = 0

    async def sample(self, base: str, request: SampleRequest) -> Sampled:
        served = self._admit(base, request)
        sequences = []
        for index in range(request.n):
            ids, finish = self._tokens(request, index)
            logprobs = None if request.settings.logprobs is None else tuple(token_logprob(t) for t in ids)
            sequences.append(Sequence(ids, logprobs, finish))
        prompt = None
        if request.settings.prompt_logprobs is not None:
            prompt = (None, *(token_logprob(token) for token in request.prompt[1:]))
        return Sampled(served, tuple(sequences), prompt)

    @asynccontextmanager
    async def stream(self, base: str, request: SampleRequest) -> AsyncIterator[SampleStream]:
        served = self._admit(base, request)
        self.open_streams += 1
        try:
            yield SampleStream(served, self._chunks(request))
        finally:
            self.open_streams -= 1

    async def _chunks(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        for index in range(request.n):
            ids, finish = self._tokens(request, index)
            for position, token in enumerate(ids):
                logprobs = None if request.settings.logprobs is None else (token_logprob(token),)
                last = position == len(ids) - 1
                yield SampleChunk(index, (token,), logprobs, finish_reason=finish if last else None)
            if not ids:
                yield SampleChunk(index, (), finish_reason=finish)

    def _tokens(self, request: SampleRequest, index: int) -> tuple[tuple[int, ...], FinishReason]:
        ids = self.reply(request, index)
        limit = request.settings.max_tokens
        return ids[:limit], "stop" if len(ids) < limit else "length"

    def _admit(self, base: str, request: SampleRequest) -> Served:
        self.requests.append(request)
        if self.failures:
            raise self.failures.pop(0)
        digest: str | None = None
        if request.revision is not None:
            if self.adapters is not None and request.revision not in self.adapters:
                raise Refused(f"revision {request.revision} does not exist", code="unknown_revision", status=404)
            digest = (self.adapters or {}).get(request.revision) or _sha256(request.revision)
        return Served(base, self.base_sha256, request.revision, digest, "fake-0", "fake-boot", "fake")


def hashed_tokens(request: SampleRequest, index: int) -> tuple[int, ...]:
    """The default reply: `max_tokens` ids in 3…49151, each from the request and its position alone."""
    seed = f"{request.revision}|{request.prompt}|{request.seed}|{index}"
    return tuple(3 + int(_sha256(f"{seed}|{i}")[:8], 16) % 49149 for i in range(request.settings.max_tokens))


def token_logprob(token: int) -> float:
    """A made-up logprob in (-2, 0], a function of the token alone."""
    return -(token % 100) / 50.0


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
