"""A task in hand: which prompts a step trains on, which are held out, and what completions are worth.

Invariant: train and held-out items are disjoint, and both draws depend on their arguments alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from shared.errors import MintError
from shared.sampling.proved import gather_bounded
from shared.tasks.chat import Chat, Messages
from shared.tasks.lazy import Lazy
from shared.tasks.permutation import Permutation
from shared.tasks.reward import BatchReward, OneByOne, RewardError, Sample

__all__ = ["Chat", "TaskItem", "TaskSet", "demonstrations"]

CONCURRENCY = 4
CHECK_EVERY_S = 1.0


@dataclass(frozen=True)
class TaskItem:
    """`id` is for people: the sum itself, or `line-12` of a file. `place`: what a generator knows it by."""

    id: str
    messages: Messages
    answer: str
    place: int = 0


def _places() -> asyncio.Semaphore:
    return asyncio.Semaphore(CONCURRENCY)


@dataclass(frozen=True)
class TaskSet:
    """`train_items` and `held_out_items` may be computed on demand and very long: index, do not list them.

    `scorer` names `reward`. `sha256` is the task's digest: the prompts and their split, without the
    reward. `places` bounds the reward's calls at once, over every task that it is given to; None = the
    reward sees to that itself."""

    train_items: Sequence[TaskItem]
    held_out_items: Sequence[TaskItem]
    reward: OneByOne | BatchReward
    scorer: str
    sha256: str
    places: asyncio.Semaphore | None = field(default_factory=_places, compare=False)

    def step_items(self, seed: int, step: int, n: int) -> list[TaskItem]:
        """The `n` train items of `step` (1, 2, …): every item once an epoch, each epoch shuffled anew.

        Raises ValueError when there is nothing to train on, or an item cannot be made."""
        if step < 1 or n < 1:
            raise ValueError(f"step {step} with {n} prompts: both start at 1")
        size = len(self.train_items)
        if size == 0:
            raise ValueError("the task has no train items; hold out fewer")
        first = (step - 1) * n
        epochs = {e: Permutation(size, f"train|{seed}|{e}") for e in range(first // size, (first + n - 1) // size + 1)}
        return [self.train_items[epochs[at // size][at % size]] for at in range(first, first + n)]

    def held_out(self, n: int) -> Sequence[TaskItem]:
        """The same `n` held-out items each time, or all where there are fewer, each computed when asked
        for. The first n of a larger n are those of a smaller. Raises ValueError when nothing is held out."""
        size = len(self.held_out_items)
        if size == 0:
            raise ValueError("the task has no held-out items; give it more prompts or hold out more of them")
        order = Permutation(size, f"held-out|{self.sha256}")
        return Lazy(min(n, size), lambda at: self.held_out_items[order[at]])

    async def score_batch(
        self, batch: Sequence[tuple[TaskItem, str]], check: Callable[[], None] = lambda: None
    ) -> list[float]:
        """A finite number for each (item, completion), in order. `check` is called about every second until
        they are there, and raises when they are no longer wanted.

        Raises RewardError naming the item when the reward raises or is not finite, and what a reward that
        asks elsewhere raises (Retryable, Fatal). The first error ends the rest of the batch, as `check` does."""
        samples = [Sample(item.id, item.messages, completion, item.answer, item.place) for item, completion in batch]
        size = 1 if callable(self.reward) else self.reward.batch_size or max(1, len(samples))
        parts = [samples[at : at + size] for at in range(0, len(samples), size)]
        scoring = asyncio.ensure_future(gather_bounded(max(1, len(parts)), self._part, parts))
        try:
            while not (await asyncio.wait([scoring], timeout=CHECK_EVERY_S))[0]:
                check()
            return [score for scores in await scoring for score in scores]
        finally:
            scoring.cancel()
            await asyncio.gather(scoring, return_exceptions=True)

    def score(self, item: TaskItem, completion: str) -> float:
        """As `score_batch`, at once and in this thread; for rewards that score one by one."""
        sample = Sample(item.id, item.messages, completion, item.answer, item.place)
        if not callable(self.reward):
            raise TypeError(f"{self.scorer} scores batches; await score_batch")
        try:
            value = self.reward(completion, item.answer)
        except Exception as error:
            raise self._failed([sample], error) from error
        return self._number(sample, value)

    async def _part(self, part: Sequence[Sample]) -> list[float]:
        async with self.places or nullcontext():
            try:
                if callable(self.reward):
                    values: Sequence[float] = [await asyncio.to_thread(self.reward, part[0].completion, part[0].answer)]
                else:
                    values = await self.reward.scores(part)
                    if len(values) != len(part):
                        raise ValueError(f"{len(values)} scores came for {len(part)} completions")
            except MintError:
                raise
            except Exception as error:
                raise self._failed(part, error) from error
        return [self._number(sample, value) for sample, value in zip(part, values, strict=True)]

    def _number(self, sample: Sample, value: object) -> float:
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError) as error:
            raise self._failed([sample], error) from error
        if not math.isfinite(number):
            raise RewardError(f"the reward {self.scorer} gave {number} on prompt {sample.id}; rewards must be finite")
        return number

    def _failed(self, part: Sequence[Sample], error: Exception) -> RewardError:
        ids = list(dict.fromkeys(sample.id for sample in part))
        rest = f", {ids[1]}{' …' if len(ids) > 2 else ''} ({len(ids)} prompts)" if len(ids) > 1 else ""
        reason = f"{type(error).__name__}: {error}"
        return RewardError(f"the reward {self.scorer} failed on prompt {ids[0]}{rest}: {reason[:1000]}")


def demonstrations(task: TaskSet) -> Sequence[Chat]:
    """The train items answered exactly: what supervised fine-tuning learns from."""

    def answered(index: int) -> Chat:
        item = task.train_items[index]
        return Chat((*item.messages, {"role": "assistant", "content": item.answer}), item.id)

    return Lazy(len(task.train_items), answered)
