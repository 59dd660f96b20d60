"""Sample operations: one prompt, several sequences, each by a request of its own to serving.

In: what a sample operation asks, and the revision that must answer it. Out: its result. Invariants: every sequence
comes from that revision; sequence i depends on the prompt, the settings and (seed, i) alone, so that the same
operation gives the same sequences whoever does it, and however often.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from services.rollout.stop_text import StopText
from shared.bases import Base
from shared.catalog.operations import SampleTaken
from shared.engine.port import SampleChunk, SampleRequest, SamplingSettings
from shared.errors import Fatal, Refused, Retryable
from shared.operations.payload import Array, SamplePayload, SampleResult, Sequence
from shared.rl.seeds import derive_seed
from shared.sampling.port import INTERACTIVE, Sampler, SampleStream
from shared.sampling.proved import gather_bounded, require_served
from shared.text import TextCodec

__all__ = ["OperationSampler", "UserFault"]

Top = tuple[tuple[int, float], ...]
Check = Callable[[], None]

_UNKNOWN = "unknown_revision"
_USERS = frozenset({"invalid_request", _UNKNOWN})


class UserFault(Exception):
    """What was asked for cannot be had; the message says why."""


@dataclass
class _Drawn:
    """One sequence as its chunks come in."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None
    prompt: tuple[float | None, ...] | None = None
    tops: tuple[dict[int, float] | None, ...] | None = None


class OperationSampler:
    """On one base; `places` bounds the sequences that this process has under way, whatever operation they are of."""

    def __init__(
        self, sampler: Sampler, base: Base, codec: TextCodec, places: asyncio.Semaphore, patience_s: float = 180.0
    ) -> None:
        self._sampler, self._base, self._codec = sampler, base, codec
        self._places, self._patience_s = places, patience_s

    async def sample(self, request_id: str, taken: SampleTaken, asked: SamplePayload, check: Check) -> SampleResult:
        """`check` is called all along and raises when the work is no longer wanted.

        Raises UserFault, and Retryable while serving is away or cannot be believed."""
        settings, prompt = self._settings(asked), tuple(asked.prompt.tolist())
        attempt = uuid.uuid4().hex[:8]

        async def one(index: int) -> _Drawn:
            request = SampleRequest(
                request_id=f"{request_id}/{index}/{attempt}",
                prompt=prompt,
                settings=settings if index else _with_prompt(settings, asked),
                revision=taken.revision,
                seed=derive_seed("tinker", request_id if asked.seed is None else asked.seed, index),
                priority=INTERACTIVE,
                tenant=taken.tenant,
            )
            return await self._patiently(request, taken, asked, check)

        drawn = await gather_bounded(asked.num_samples, one, range(asked.num_samples))
        return SampleResult(
            sequences=tuple(_sequence(each) for each in drawn),
            prompt_logprobs=_prompt_logprobs(drawn[0]) if asked.prompt_logprobs else None,
            topk=_topk(drawn[0], asked.topk_prompt_logprobs) if asked.topk_prompt_logprobs else None,
            revision=taken.revision or "",
            adapter_sha256=taken.adapter_sha256 or "",
        )

    def _settings(self, asked: SamplePayload) -> SamplingSettings:
        room = self._base.max_context - len(asked.prompt)
        if room < 1:
            raise UserFault(
                f"the prompt has {len(asked.prompt)} tokens; the context of {self._base.name} is "
                f"{self._base.max_context}, and one of them is needed for an answer"
            )
        if asked.num_samples < 1:
            raise UserFault(f"num_samples is {asked.num_samples}; it must be at least 1")
        if not all(asked.stop_strings):
            raise UserFault("a stop string is empty; it would stop everywhere")
        return SamplingSettings(
            max_tokens=room if asked.max_tokens is None else asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            stop_token_ids=() if asked.ignore_eos else asked.stop_tokens or self._codec.eos_ids,
            logprobs=0,
        )

    async def _patiently(
        self, request: SampleRequest, taken: SampleTaken, asked: SamplePayload, check: Check
    ) -> _Drawn:
        since, tries = math.inf, 0
        while True:
            check()
            try:
                # a place is held while somebody works, not while somebody is waited for
                async with self._places, self._sampler.stream(self._base.name, request) as stream:
                    self._believe(stream, request, taken)
                    return await self._draw(stream, request, asked, check)
            except Refused as error:
                raise _verdict(error, request, self._base) from error
            except Retryable as error:
                delay = error.delay_s if error.delay_s is not None else min(0.5 * 2**tries, 10.0)
                # from the first trouble on: neither the wait for a place nor the drawing counts
                since = min(since, time.monotonic())
                if time.monotonic() + delay - since > self._patience_s:
                    raise
                await asyncio.sleep(delay)
                tries += 1

    def _believe(self, stream: SampleStream, request: SampleRequest, taken: SampleTaken) -> None:
        """Raises Retryable when something else answered than was asked."""
        try:
            require_served(stream.served, self._base, request.revision, taken.adapter_sha256)
        except Fatal as error:
            raise Retryable(str(error)) from error

    async def _draw(self, stream: SampleStream, request: SampleRequest, asked: SamplePayload, check: Check) -> _Drawn:
        """Until the sequence ends or a stop string is complete; leaving the stream ends what still generates."""
        drawn = _Drawn()
        text = StopText(self._codec, asked.stop_strings)
        async for chunk in stream.chunks:
            check()
            drawn.prompt = chunk.prompt_logprobs or drawn.prompt
            drawn.tops = chunk.prompt_top_logprobs or drawn.tops
            taken_now = _up_to_stop(chunk, text)
            drawn.tokens += chunk.token_ids[:taken_now]
            drawn.logprobs += (chunk.logprobs or ())[:taken_now]
            drawn.reason = "stop" if text.complete else chunk.finish_reason
            if text.complete:
                break
        _require_whole(drawn, request)
        return drawn


def _up_to_stop(chunk: SampleChunk, text: StopText) -> int:
    """How many of the chunk's tokens belong to the sequence: the one that completes a stop string is the last."""
    for number, token in enumerate(chunk.token_ids, start=1):
        if text.push(token):
            return number
    return len(chunk.token_ids)


def _with_prompt(settings: SamplingSettings, asked: SamplePayload) -> SamplingSettings:
    """Prompt logprobs are asked for once, with the first sequence."""
    if not (asked.prompt_logprobs or asked.topk_prompt_logprobs):
        return settings
    return replace(settings, prompt_logprobs=asked.topk_prompt_logprobs)


def _verdict(error: Refused, request: SampleRequest, base: Base) -> UserFault | Retryable:
    if error.code == _UNKNOWN:
        return UserFault(f"{request.revision} can no longer be sampled from; it expired or was deleted: {error}")
    if error.code in _USERS:
        return UserFault(str(error))
    return Retryable(f"serving refused to sample {request.revision or base.name}: {error}")


def _require_whole(drawn: _Drawn, request: SampleRequest) -> None:
    if drawn.reason not in ("stop", "length") or not drawn.tokens:
        raise Retryable(f"a sequence of {len(drawn.tokens)} tokens ended with {drawn.reason!r}; sampling again")
    if len(drawn.logprobs) != len(drawn.tokens) or not all(map(math.isfinite, drawn.logprobs)):
        raise Retryable(f"{len(drawn.logprobs)} logprobs came for {len(drawn.tokens)} tokens, or some not finite")
    asked = request.settings.prompt_logprobs
    if asked is None:
        return
    if drawn.prompt is None or len(drawn.prompt) != len(request.prompt):
        raise Retryable(f"the logprobs of a prompt of {len(request.prompt)} tokens did not come")
    if asked and (drawn.tops is None or len(drawn.tops) != len(request.prompt)):
        raise Retryable(f"the {asked} most likely tokens of each prompt position did not come")


def _sequence(drawn: _Drawn) -> Sequence:
    return Sequence(
        tokens=np.asarray(drawn.tokens, np.int64),
        logprobs=np.asarray(drawn.logprobs, np.float32),
        stop_reason="stop" if drawn.reason == "stop" else "length",
    )


def _prompt_logprobs(drawn: _Drawn) -> Array:
    """[P], NaN where there is none: the first has nothing before it."""
    return np.asarray([math.nan if value is None else value for value in drawn.prompt or ()], np.float32)


def _topk(drawn: _Drawn, k: int) -> tuple[Top, ...]:
    """The k most likely of each position; the engine adds the prompt's own token where it is not among them."""
    return tuple(
        tuple(sorted(((t, lp) for t, lp in (top or {}).items() if math.isfinite(lp)), key=lambda it: -it[1])[:k])
        for top in drawn.tops or ()
    )
