"""From the tagged unions of a request to a task or demonstrations in hand.

In: `task` or `data` of a TrainRequested or a command, and a way to read files. Out: items. Reading and
parsing happen off the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from mint_schemas.common import FileRef
from mint_schemas.training import ArithmeticTask, Data, JsonlMessages, JsonlPrompts, Task, TaskDemonstrations

from shared.errors import Fatal
from shared.tasks.arithmetic import arithmetic_items
from shared.tasks.digest import task_digest
from shared.tasks.jsonl import is_held_out, parse_messages_jsonl, parse_prompts_jsonl
from shared.tasks.rewards import reward_function, scorer_name
from shared.tasks.taskset import Chat, TaskItem, TaskSet, demonstrations

__all__ = ["Read", "TaskLoader", "load_demonstrations", "load_task"]

Read = Callable[[FileRef], Awaitable[bytes]]
"""Usually `store.get`, which verifies size and sha256."""


async def load_task(task: Task, read: Read) -> TaskSet:
    """Raises ValueError saying what is wrong with the task's data or reward, and what `read` raises."""
    reward = await asyncio.to_thread(reward_function, task.reward)
    train, held_out = await _items(task, read)
    return TaskSet(train, held_out, reward, scorer_name(task.reward), task_digest(task))


class TaskLoader:
    """The tasks that a worker used last, so that a step does not read and parse its file again. They are
    immutable: a task's data is named by its sha256."""

    def __init__(self, read: Read, keep: int = 4) -> None:
        self._read, self._keep = read, keep
        self._tasks: dict[str, TaskSet] = {}

    async def load(self, task: Task) -> TaskSet:
        """Raises Fatal where `load_task` raises ValueError, since a retry would not mend the data."""
        key = task.model_dump_json()
        loaded = self._tasks.pop(key, None)
        if loaded is None:
            try:
                loaded = await load_task(task, self._read)
            except ValueError as error:
                raise Fatal(f"the {task.kind} task cannot be used: {error}") from error
        self._tasks[key] = loaded
        while len(self._tasks) > self._keep:
            del self._tasks[next(iter(self._tasks))]
        return loaded


async def load_demonstrations(data: Data, read: Read) -> Sequence[Chat]:
    """The chats of supervised fine-tuning, at least one. Raises like `load_task`."""
    match data:
        case TaskDemonstrations():
            chats = demonstrations(await load_task(data.task, read))
        case JsonlMessages():
            chats = await asyncio.to_thread(parse_messages_jsonl, await read(data.data))
    if not chats:
        raise ValueError("there are no demonstrations to train on; hold out fewer prompts")
    return chats


async def _items(task: Task, read: Read) -> tuple[Sequence[TaskItem], Sequence[TaskItem]]:
    match task:
        case ArithmeticTask():
            return arithmetic_items(task.max_operand)
        case JsonlPrompts():
            items = await asyncio.to_thread(parse_prompts_jsonl, await read(task.data))
            train = [item for item in items if not is_held_out(item, task.held_out)]
            return train, [item for item in items if is_held_out(item, task.held_out)]
