"""Every generator of reasoning-gym as a task, with its own verifier.

In: its name, size, seed and own settings. Out: items, computed on demand, and a reward. The library is an
optional extra and runs in processes of its own (`host.py`), with bounded time and memory. Invariants: an item
is a function of (name, size, seed, config, release of the library) alone; no prompt is on both sides,
even if the generator repeats itself; a completion that the verifier cannot read is worth 0.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from mint_schemas.training import ReasoningGym

from shared.tasks.hosted import Hosted, HostError
from shared.tasks.jsonl import is_held_out
from shared.tasks.lazy import Lazy
from shared.tasks.reward import Sample, said
from shared.tasks.taskset import TaskItem

__all__ = ["Gym", "gym_scorer", "gym_version"]

TRIES_WITHOUT_NEWS = 1000
TRIES_S = 20.0
"""A search for an item on its side ends after so many prompts that were all seen before, or so long."""
SEED_STRIDE = 1_640_531_527
"""Item i of seed s is often item i − 1 of seed s + 1; further tries begin far from each other."""


def gym_version(task: ReasoningGym) -> str:
    """Raises ValueError saying how to install the library where it is not."""
    try:
        return version("reasoning-gym")
    except PackageNotFoundError as error:
        raise ValueError(
            f"the task reasoning_gym {task.name!r} needs the optional library reasoning-gym, which is not installed "
            "here; run `make reasoning-gym` (or `python -m pip install --no-deps -r requirements-reasoning-gym.lock`; "
            "one of its parts needs a C compiler) where the catalog, rollout, evaluator and learner run"
        ) from error


def gym_scorer(task: ReasoningGym) -> str:
    """The generator's verifier, by the library's release. Raises like `gym_version`."""
    return f"reasoning_gym:{task.name}@{gym_version(task)}"


class Gym:
    """The items of both sides, and a `BatchReward`. Safe from many threads."""

    batch_size: int | None = 8

    def __init__(self, task: ReasoningGym, concurrency: int) -> None:
        """Raises ValueError, in words, for a library that is missing, an unknown name or setting, and a
        generator that refuses its settings or takes too much to make its first item."""
        gym_version(task)
        self._task = task
        opening = {"kind": "gym", "stride": SEED_STRIDE, **task.model_dump(include={"name", "size", "seed", "config"})}
        try:
            self._host = Hosted(opening, children=max(1, min(concurrency, os.cpu_count() or 1)))
        except HostError as error:
            raise ValueError(str(error)) from error
        held_out = min(max(round(task.size * task.held_out), 1), task.size - 1) if task.held_out else 0
        self._train, self._held_out = task.size - held_out, held_out

    @property
    def train_items(self) -> Sequence[TaskItem]:
        return Lazy(self._train, lambda at: self._item(at, False))

    @property
    def held_out_items(self) -> Sequence[TaskItem]:
        return Lazy(self._held_out, lambda at: self._item(self._train + at, True))

    async def scores(self, samples: Sequence[Sample]) -> list[float]:
        """In [0, 1], as the generator's verifier says of what each completion gives as its answer."""
        return await asyncio.to_thread(lambda: [self._score(sample) for sample in samples])

    def _score(self, sample: Sample) -> float:
        try:
            answer = self._host.ask({"entry": divmod(sample.place, self._task.size), "score": said(sample.completion)})
        except HostError as error:
            if error.over:
                return 0.0
            raise
        return float(answer["score"]) if "score" in answer else 0.0

    def _item(self, at: int, held_out: bool) -> TaskItem:
        """Item `at` of the first seed under which its prompt falls on this side."""
        share, seen, news = self._task.held_out, set(), 0
        wanted = share if held_out else 1 - share
        began = time.monotonic()
        for attempt in range(math.ceil(20 / min(share, 1 - share)) if share else 1):
            item = self._made(attempt, at)
            if is_held_out(item, share) == held_out:
                return item
            prompt = str(item.messages)
            news = news if prompt in seen else attempt
            seen.add(prompt)
            if attempt - news >= TRIES_WITHOUT_NEWS or time.monotonic() - began > TRIES_S:
                break
        side = "evaluate" if held_out else "train"
        if attempt - news >= TRIES_WITHOUT_NEWS or 10 * len(seen) <= attempt:
            cause = (
                f"gives so few different prompts ({len(seen)} in {attempt + 1} tries) that none is there to {side} on"
            )
            raise ValueError(f"the generator {self._task.name} {cause}; change its config, or held_out from {share:g}")
        raise ValueError(
            f"none of {attempt + 1} prompts of the generator {self._task.name}, made in "
            f"{time.monotonic() - began:.0f} s, is among the share of {wanted:g} to {side} on; bring held_out nearer "
            f"to a half, from {share:g}, or choose a config that is made faster"
        )

    def _made(self, attempt: int, at: int) -> TaskItem:
        try:
            entry = self._host.ask({"entry": (attempt, at)})
        except HostError as error:
            raise ValueError(f"the generator {self._task.name} cannot make item {at}: {error}") from error
        name = f"{self._task.name}-{at}" + (f".{attempt}" if attempt else "")
        messages = ({"role": "user", "content": entry["question"]},)
        return TaskItem(name, messages, entry["answer"], attempt * self._task.size + at)
