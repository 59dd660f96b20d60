"""A task in hand: which prompts a step trains on, which are held out, and what a completion is worth.

Invariant: train and held-out items are disjoint, and both draws depend on their arguments alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.tasks.lazy import Lazy
from shared.tasks.permutation import Permutation
from shared.tasks.rewards import RewardError

__all__ = ["Chat", "TaskItem", "TaskSet", "demonstrations"]

Chat = tuple[dict[str, str], ...]
"""Messages with `role` and `content`, in order."""


@dataclass(frozen=True)
class TaskItem:
    """`id` is for people: the sum itself, or `line-12` of a file."""

    id: str
    messages: Chat
    answer: str


@dataclass(frozen=True)
class TaskSet:
    """`train_items` and `held_out_items` may be computed on demand and very long: index, do not list them.

    `reward` maps (completion, answer) to a number; `scorer` names it. `sha256` is the task's digest:
    the prompts and their split, without the reward."""

    train_items: Sequence[TaskItem]
    held_out_items: Sequence[TaskItem]
    reward: Callable[[str, str], float]
    scorer: str
    sha256: str

    def step_items(self, seed: int, step: int, n: int) -> list[TaskItem]:
        """The `n` train items of `step` (1, 2, …): every item once an epoch, each epoch shuffled anew.

        Raises ValueError when there is nothing to train on."""
        if step < 1 or n < 1:
            raise ValueError(f"step {step} with {n} prompts: both start at 1")
        size = len(self.train_items)
        if size == 0:
            raise ValueError("the task has no train items; hold out fewer")
        first = (step - 1) * n
        epochs = {e: Permutation(size, f"train|{seed}|{e}") for e in range(first // size, (first + n - 1) // size + 1)}
        return [self.train_items[epochs[at // size][at % size]] for at in range(first, first + n)]

    def held_out(self, n: int) -> list[TaskItem]:
        """The same `n` held-out items each time, or all where there are fewer. The first n of a larger n
        are those of a smaller. Raises ValueError when nothing is held out."""
        size = len(self.held_out_items)
        if size == 0:
            raise ValueError("the task has no held-out items; give it more prompts or hold out more of them")
        order = Permutation(size, f"held-out|{self.sha256}")
        return [self.held_out_items[order[at]] for at in range(min(n, size))]

    def score(self, item: TaskItem, completion: str) -> float:
        """A finite number. Raises RewardError naming the item when the reward raises or is not finite."""
        try:
            value = float(self.reward(completion, item.answer))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise RewardError(f"the reward {self.scorer} failed on prompt {item.id}: {reason}") from error
        if not math.isfinite(value):
            raise RewardError(f"the reward {self.scorer} gave {value} on prompt {item.id}; rewards must be finite")
        return value


def demonstrations(task: TaskSet) -> Sequence[Chat]:
    """The train items answered exactly: what supervised fine-tuning learns from."""

    def answered(index: int) -> Chat:
        item = task.train_items[index]
        return (*item.messages, {"role": "assistant", "content": item.answer})

    return Lazy(len(task.train_items), answered)
