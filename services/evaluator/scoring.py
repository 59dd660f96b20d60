"""Scoring a revision, or the base, on held-out items.

In: a command, its task, and a sampler; out: the score with every item's completion beside it. Invariants:
decoding is greedy; every completion comes from the revision that the command names; the items are the
same ones each time, and none of them is a train item.
"""

from __future__ import annotations

import asyncio
import gzip
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from mint_schemas.commands import EvaluationRequested
from pydantic import BaseModel, ConfigDict

from shared.bases import Base
from shared.engine.port import SampleRequest, SamplingSettings
from shared.errors import Fatal
from shared.sampling.port import BACKGROUND, Sampler
from shared.sampling.proved import ProvedSampler, gather_bounded
from shared.tasks import TaskItem, TaskSet, prompt_ids
from shared.text import TextCodec

__all__ = ["Details", "ScoredItem", "Scorer"]


class ScoredItem(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")
    id: str
    prompt: tuple[dict[str, str], ...]
    answer: str
    completion: str
    finish_reason: str
    score: float


class Details(BaseModel):
    """One evaluation for people and for later questions; the same evaluation gives the same bytes."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    format: int = 1
    run_id: str
    base: str
    base_sha256: str
    revision: str | None
    adapter_sha256: str | None
    task_sha256: str
    scorer: str
    sampling: dict[str, float]
    score: float
    items: tuple[ScoredItem, ...]

    def to_bytes(self) -> bytes:
        return gzip.compress(self.model_dump_json().encode(), mtime=0)

    @classmethod
    def from_bytes(cls, data: bytes) -> Details:
        """Raises ValueError for bytes that are no details file."""
        return cls.model_validate_json(gzip.decompress(data))


@dataclass(frozen=True)
class _Answer:
    item: TaskItem
    completion: str
    finish_reason: str

    def scored(self, score: float) -> ScoredItem:
        return ScoredItem(
            id=self.item.id,
            prompt=self.item.messages,
            answer=self.item.answer,
            completion=self.completion,
            finish_reason=self.finish_reason,
            score=score,
        )


@dataclass(frozen=True)
class Scorer:
    """Samples through `sampler`, `items_in_flight` items at once."""

    sampler: Sampler
    base: Base
    codec: TextCodec
    items_in_flight: int = 64
    patience_s: float = 180.0

    async def details(self, command: EvaluationRequested, task: TaskSet, check: Callable[[], None]) -> Details:
        """`check` is called before each item, before scoring and during it, and raises when the work is no
        longer wanted. All completions are scored as one batch.

        Raises Fatal naming the prompt (reward, template, context length) or the revision that answered
        instead, and Retryable while serving is away."""
        try:
            items = await asyncio.to_thread(lambda: list(task.held_out(command.items)))
        except ValueError as error:
            raise Fatal(f"nothing to evaluate on: {error}") from error
        proved = ProvedSampler(self.sampler, self.base, command.adapter_sha256, check, self.patience_s)
        attempt = uuid.uuid4().hex[:8]

        async def answer(item: TaskItem) -> _Answer:
            sampled = await proved.sample(self._request(command, item, attempt))
            sequence = sampled.sequences[0]
            return _Answer(item, self.codec.decode(sequence.token_ids), sequence.finish_reason)

        answers = await gather_bounded(self.items_in_flight, answer, items)
        check()
        scores = await task.score_batch([(answered.item, answered.completion) for answered in answers], check)
        scored = [answered.scored(score) for answered, score in zip(answers, scores, strict=True)]
        return Details(
            run_id=command.run_id,
            base=self.base.name,
            base_sha256=self.base.sha256,
            revision=command.revision,
            adapter_sha256=command.adapter_sha256,
            task_sha256=task.sha256,
            scorer=task.scorer,
            sampling={"temperature": 0.0, "max_tokens": float(command.max_tokens)},
            score=fmean(item.score for item in scored),
            items=tuple(scored),
        )

    def _request(self, command: EvaluationRequested, item: TaskItem, attempt: str) -> SampleRequest:
        return SampleRequest(
            request_id=f"{command.command_id}/{item.id}/{attempt}",
            prompt=prompt_ids(item, self.codec, self.base, command.max_tokens),
            settings=SamplingSettings(
                max_tokens=command.max_tokens, temperature=0.0, stop_token_ids=self.codec.eos_ids
            ),
            revision=command.revision,
            seed=command.seed,
            priority=BACKGROUND,
        )
