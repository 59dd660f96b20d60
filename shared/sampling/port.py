"""Sampling as its callers see it: rollout, evaluator and gateway ask by base and revision, and a
replica on which the revision is ready answers. Implementation over HTTP: `remote.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from shared.engine.port import SampleChunk, SampleRequest

INTERACTIVE, PREWARM, BACKGROUND = 0, 5, 10
"""`SampleRequest.priority`: people who wait, what will be wanted soon, and work that nobody watches."""


@dataclass(frozen=True)
class Served:
    """What really ran: the proof that each answer carries."""

    base: str
    base_sha256: str
    revision: str | None
    adapter_sha256: str | None
    replica: str
    boot_id: str
    engine: str


@dataclass(frozen=True)
class Sequence:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str


@dataclass(frozen=True)
class Sampled:
    served: Served
    sequences: tuple[Sequence, ...]
    prompt_logprobs: tuple[float | None, ...] | None = None


@dataclass(frozen=True)
class SampleStream:
    served: Served
    chunks: AsyncIterator[SampleChunk]


class Sampler(Protocol):
    """Raises Refused (unknown revision, bad settings) and Retryable (no replica ready, replica lost
    before the first chunk was passed on)."""

    async def sample(self, base: str, request: SampleRequest) -> Sampled: ...

    def stream(self, base: str, request: SampleRequest) -> AbstractAsyncContextManager[SampleStream]:
        """Leaving the context aborts generation."""
        ...
