"""Sampling for work that must not be wrong: rollouts and evaluations.

In: a request and what must answer it; out: sequences that are proved to come from there. Invariant: an
answer from another revision, other adapter bytes or another base is never returned. A replica that is
away is waited for, so that its restart costs a run seconds and not its attempts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from shared.bases import Base
from shared.engine.port import SampleRequest
from shared.errors import Fatal, Refused, Retryable
from shared.sampling.port import Sampled, Sampler, Served

__all__ = ["ProvedSampler", "gather_bounded", "require_served"]

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ProvedSampler:
    """`patience_s`: how long one request waits for a replica in all; `check` is called before each try
    and raises when the work is no longer wanted."""

    sampler: Sampler
    base: Base
    adapter_sha256: str | None
    check: Callable[[], None]
    patience_s: float = 180.0

    async def sample(self, request: SampleRequest) -> Sampled:
        """`request.n` sequences. Raises Fatal (refused by serving, or answered by something else) and
        Retryable (no replica within the patience, or a generation that was aborted)."""
        began, tries = time.monotonic(), 0
        while True:
            self.check()
            try:
                sampled = await self.sampler.sample(self.base.name, request)
                require_served(sampled.served, self.base, request.revision, self.adapter_sha256)
                _require_whole(sampled, request)
                return sampled
            except Refused as error:
                raise Fatal(f"serving refused to sample {request.revision or self.base.name}: {error}") from error
            except Retryable as error:
                delay = error.delay_s if error.delay_s is not None else min(0.5 * 2**tries, 10.0)
                if time.monotonic() + delay - began > self.patience_s:
                    raise
                await asyncio.sleep(delay)
                tries += 1


def require_served(served: Served, base: Base, revision: str | None, adapter_sha256: str | None) -> None:
    """Raises Fatal naming what was asked and what answered, unless they are the same."""
    asked = (base.name, base.sha256, revision, adapter_sha256)
    got = (served.base, served.base_sha256, served.revision, served.adapter_sha256)
    for what, a, g in zip(("base", "base sha256", "revision", "adapter sha256"), asked, got, strict=True):
        if a != g:
            raise Fatal(
                f"asked for {revision or base.name}, but replica {served.replica} answered with {what} {g} "
                f"instead of {a}; the samples are stale or foreign and are not used"
            )


def _require_whole(sampled: Sampled, request: SampleRequest) -> None:
    if len(sampled.sequences) != request.n:
        raise Retryable(f"asked for {request.n} sequences, {len(sampled.sequences)} came; sampling again")
    for sequence in sampled.sequences:
        if sequence.finish_reason not in ("stop", "length") or not sequence.token_ids:
            length = len(sequence.token_ids)
            raise Retryable(f"a sequence of {length} tokens ended with {sequence.finish_reason!r}; sampling again")
        if request.settings.logprobs is None:
            continue
        logprobs = sequence.logprobs or ()
        if len(logprobs) != len(sequence.token_ids) or not all(math.isfinite(value) for value in logprobs):
            raise Fatal(
                f"{sampled.served.engine} on {sampled.served.replica} gave {len(logprobs)} logprobs for "
                f"{len(sequence.token_ids)} tokens, or some that are not finite; they cannot be trained on"
            )


async def gather_bounded(limit: int, work: Callable[[T], Awaitable[R]], items: Iterable[T]) -> list[R]:
    """`work` on every item, at most `limit` at once; results in the order of the items. The first error
    ends the others and is raised as it is."""
    places = asyncio.Semaphore(limit)

    async def one(item: T) -> R:
        async with places:
            return await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
