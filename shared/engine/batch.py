"""One static batch: prompts in, tokens of many sequences out, one step at a time.

`Batch` runs on any `TokenModel`, which computes logits and nothing else; drawing, stops, chunks and
aborted sequences are handled here, the same for every such engine.

Invariant: a sequence's tokens depend on its prompt, revision, settings and seed, never on its neighbours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from shared.engine.drawing import Row, draw, log_softmax, top_logprobs
from shared.engine.port import EngineError, FinishReason, SampleChunk, SampleRequest

Rows = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Prefilled:
    """`last` is float32 [prompts, vocabulary]: the logits after each prompt. `full[i]` is the logits
    at every position of prompt i, [tokens, vocabulary], where they were asked for. `state` belongs to
    the model and has one row per prompt."""

    state: Any
    last: Rows
    full: list[Rows | None]


class TokenModel(Protocol):
    """Logits of a resident base model, with an adapter (by handle) or none per row."""

    vocab_size: int

    def prefill(
        self, prompts: Sequence[tuple[int, ...]], adapters: Sequence[int | None], full: Sequence[bool]
    ) -> Prefilled: ...

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        """The state with these rows, in this order, repeats allowed."""
        ...

    def decode(self, state: Any, tokens: Sequence[int]) -> Rows:
        """One token further per row: float32 [rows, vocabulary]."""
        ...


@dataclass
class Job:
    """One request on its way through a batch. `chunks` is read by the caller's iterator."""

    request: SampleRequest
    adapter: int | None
    seeds: list[int]
    chunks: asyncio.Queue[SampleChunk | EngineError] = field(default_factory=asyncio.Queue)
    aborted: bool = False


@dataclass
class _Sequence:
    job: Job
    index: int
    rng: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    done: bool = False


Emitted = tuple[Job, SampleChunk]


class Batch:
    def __init__(self, model: TokenModel, jobs: Sequence[Job]) -> None:
        self._model = model
        self._jobs = [job for job in jobs if not job.aborted]
        self._running: list[_Sequence] = []
        self._state: Any = None
        self.finished = not self._jobs

    def step(self) -> list[Emitted]:
        """One token for each running sequence; the first step reads the prompts."""
        if self._state is None:
            return self._start()
        rows = [i for i, sequence in enumerate(self._running) if not sequence.done and not sequence.job.aborted]
        if not rows:
            self.finished = True
            return []
        if len(rows) < len(self._running):
            self._state = self._model.select(self._state, rows)
            self._running = [self._running[i] for i in rows]
        logits = self._model.decode(self._state, [sequence.tokens[-1] for sequence in self._running])
        return self._draw(logits)

    def _start(self) -> list[Emitted]:
        self._jobs = [job for job in self._jobs if not job.aborted]
        if not self._jobs:
            self.finished = True
            return []
        prefilled = self._model.prefill(
            [job.request.prompt for job in self._jobs],
            [job.adapter for job in self._jobs],
            [job.request.settings.prompt_logprobs is not None for job in self._jobs],
        )
        rows = [i for i, job in enumerate(self._jobs) for _ in range(job.request.n)]
        self._running = [
            _Sequence(job, index, np.random.Generator(np.random.PCG64(seed)))
            for job in self._jobs
            for index, seed in enumerate(job.seeds)
        ]
        self._state = self._model.select(prefilled.state, rows)
        prompts = {id(job): prefilled.full[i] for i, job in enumerate(self._jobs)}
        return [
            (job, _with_prompt(chunk, job, prompts[id(job)]) if chunk.index == 0 else chunk)
            for job, chunk in self._draw(prefilled.last[rows])
        ]

    def _draw(self, logits: Rows) -> list[Emitted]:
        emitted = [(s.job, _next_chunk(s, logits[i])) for i, s in enumerate(self._running)]
        self.finished = all(sequence.done for sequence in self._running)
        return emitted


def _next_chunk(sequence: _Sequence, logits_V: Row) -> SampleChunk:
    settings = sequence.job.request.settings
    drawn = draw(logits_V, settings, sequence.tokens, sequence.rng)
    sequence.tokens.append(drawn.token)
    reason: FinishReason | None = None
    if drawn.token in settings.stop_token_ids:
        reason = "stop"
    elif len(sequence.tokens) >= settings.max_tokens:
        reason = "length"
    sequence.done = reason is not None
    return SampleChunk(
        index=sequence.index,
        token_ids=(drawn.token,),
        logprobs=None if drawn.logprob is None else (drawn.logprob,),
        top_logprobs=(drawn.top,) if settings.logprobs and drawn.top is not None else None,
        finish_reason=reason,
    )


def _with_prompt(chunk: SampleChunk, job: Job, logits: Rows | None) -> SampleChunk:
    if logits is None:
        return chunk
    k = job.request.settings.prompt_logprobs or 0
    values, tops = prompt_logprobs(logits, job.request.prompt, k)
    return SampleChunk(
        index=chunk.index,
        token_ids=chunk.token_ids,
        logprobs=chunk.logprobs,
        top_logprobs=chunk.top_logprobs,
        finish_reason=chunk.finish_reason,
        prompt_logprobs=values,
        prompt_top_logprobs=tops if k else None,
    )


def prompt_logprobs(
    logits: Rows, prompt: Sequence[int], k: int
) -> tuple[tuple[float | None, ...], tuple[dict[int, float] | None, ...]]:
    """Temperature-1 logprob of each prompt token given those before it; the first has none."""
    values: list[float | None] = [None]
    tops: list[dict[int, float] | None] = [None]
    for position, token in enumerate(prompt[1:]):
        row = log_softmax(logits[position])
        values.append(float(row[token]))
        tops.append(top_logprobs(row, k, token))
    return tuple(values), tuple(tops)
