"""From the tagged unions of a request to a task, demonstrations or preferences in hand.

In: `task` or `data` of a TrainRequested or a command, and a way to read files. Out: items. Reading and
parsing happen off the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from mint_schemas.common import FileRef
from mint_schemas.training import (
    ArithmeticTask,
    Data,
    ExactMatch,
    JsonlMessages,
    JsonlPrompts,
    Pairs,
    ReasoningGym,
    Task,
    TaskDemonstrations,
)

from shared.errors import Fatal
from shared.tasks.arithmetic import arithmetic_items
from shared.tasks.chat import Chat
from shared.tasks.digest import task_digest
from shared.tasks.gym import Gym, gym_scorer
from shared.tasks.jsonl import is_held_out, parse_messages_jsonl, parse_prompts_jsonl
from shared.tasks.maths import MathReward
from shared.tasks.pairs import Pair, parse_pairs_jsonl
from shared.tasks.reward import NO_HOSTS, RewardSettings
from shared.tasks.rewards import reward_function, scorer_name
from shared.tasks.taskset import TaskItem, TaskSet, demonstrations
from shared.tasks.webhook import Webhook

__all__ = ["Read", "TaskLoader", "load_demonstrations", "load_pairs", "load_task"]

Read = Callable[[FileRef], Awaitable[bytes]]
"""Usually `store.get`, which verifies size and sha256."""

PROBED = 8
ANSWERS_READ = 100
"""Of each side; reading one takes milliseconds, and an answer further on is found when it is scored."""


async def load_task(task: Task, read: Read, rewards: RewardSettings = NO_HOSTS) -> TaskSet:
    """Raises ValueError saying what is wrong with the task's data or reward, and what `read` raises."""
    places: asyncio.Semaphore | None = asyncio.Semaphore(rewards.concurrency)
    if isinstance(task, ReasoningGym):
        gym = await asyncio.to_thread(Gym, task, rewards.concurrency)
        return TaskSet(gym.train_items, gym.held_out_items, gym, gym_scorer(task), task_digest(task), places)
    reward = await asyncio.to_thread(reward_function, task.reward, rewards)
    if isinstance(reward, Webhook):
        places = None
    train, held_out = await _items(task, read)
    if isinstance(reward, MathReward) and isinstance(task, JsonlPrompts):
        await asyncio.to_thread(_require_mathematics, reward, [*train[:ANSWERS_READ], *held_out[:ANSWERS_READ]])
    return TaskSet(train, held_out, reward, scorer_name(task.reward), task_digest(task), places)


class TaskLoader:
    """The tasks that a worker used last, so that a step does not read and parse its file again. They are
    immutable: a task's data is named by its sha256. One bound holds for the rewards of all of them, except
    for webhooks, each of which has its own: one that hangs must not delay the others' scores."""

    def __init__(self, read: Read, rewards: RewardSettings = NO_HOSTS, keep: int = 4) -> None:
        self._read, self._rewards, self._keep = read, rewards, keep
        self._places = asyncio.Semaphore(rewards.concurrency)
        self._tasks: dict[str, TaskSet] = {}

    async def load(self, task: Task) -> TaskSet:
        """Raises Fatal where `load_task` raises ValueError, since a retry would not mend the data."""
        key = task.model_dump_json()
        if key not in self._tasks:
            loaded = await self._loaded(task)
            self._tasks.setdefault(key, loaded)  # another command may have loaded it meanwhile
        kept = self._tasks[key] = self._tasks.pop(key)
        await self._forget(self._keep)
        return kept

    async def aclose(self) -> None:
        """Forget every task, and close the connections of their rewards."""
        await self._forget(0)

    async def _loaded(self, task: Task) -> TaskSet:
        try:
            loaded = await load_task(task, self._read, self._rewards)
        except ValueError as error:
            raise Fatal(f"the {task.kind} task cannot be used: {error}") from error
        return loaded if loaded.places is None else replace(loaded, places=self._places)

    async def _forget(self, keep: int) -> None:
        """The tasks that were used the longest ago, until `keep` are left."""
        while len(self._tasks) > keep:
            reward = self._tasks.pop(next(iter(self._tasks))).reward
            if isinstance(reward, Webhook):
                await reward.aclose()


async def load_demonstrations(data: Data, read: Read, train_on: str = "assistant") -> Sequence[Chat]:
    """The chats of supervised fine-tuning, at least one, each with something to learn under `train_on`
    (see `Sft`). Raises like `load_task`."""
    chats: Sequence[Chat]
    match data:
        case TaskDemonstrations():
            if train_on == "chosen":
                raise ValueError("train_on is chosen, but a task's demonstrations carry no weights; use assistant")
            if isinstance(data.task, ReasoningGym):
                task = await load_task(data.task, read)
                await _require_worth(task, data.task.name)
            else:
                # Nothing is scored, and the task's reward may be one that cannot be had here.
                task = await load_task(data.task.model_copy(update={"reward": ExactMatch()}), read)
            chats = demonstrations(task)
        case JsonlMessages():
            chats = await asyncio.to_thread(parse_messages_jsonl, await read(data.data), train_on)
    if not chats:
        raise ValueError("there are no demonstrations to train on; hold out fewer prompts")
    return chats


async def load_pairs(data: Pairs, read: Read) -> Sequence[Pair]:
    """The preferences of direct preference optimisation, at least one. Raises like `load_task`."""
    return await asyncio.to_thread(parse_pairs_jsonl, await read(data.data))


async def _items(task: ArithmeticTask | JsonlPrompts, read: Read) -> tuple[Sequence[TaskItem], Sequence[TaskItem]]:
    match task:
        case ArithmeticTask():
            return arithmetic_items(task.max_operand)
        case JsonlPrompts():
            items = await asyncio.to_thread(parse_prompts_jsonl, await read(task.data))
            train = [item for item in items if not is_held_out(item, task.held_out)]
            return train, [item for item in items if is_held_out(item, task.held_out)]


def _require_mathematics(reward: MathReward, items: Sequence[TaskItem]) -> None:
    for item in items:
        try:
            reward.require(item.answer)
        except ValueError as error:
            raise ValueError(f"{item.id}: {error}") from error


async def _require_worth(task: TaskSet, name: str) -> None:
    """Some generators keep no answer, or none that their own verifier accepts."""
    probed = min(PROBED, len(task.train_items))
    items = await asyncio.to_thread(lambda: [task.train_items[at] for at in range(probed)])
    for item, score in zip(items, await task.score_batch([(item, item.answer) for item in items]), strict=True):
        if not item.answer or score == 0:
            found = f"scores its own stored answer {score:g}" if item.answer else "stores no answer"
            raise ValueError(
                f"the generator {name} {found} (item {item.id}), so that there is nothing to demonstrate; "
                "train on it with grpo, which needs no answers"
            )
