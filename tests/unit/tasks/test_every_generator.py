"""Each generator of reasoning-gym gives prompts, answers and scores. Slow: each starts processes of its own."""

import asyncio
from importlib.util import find_spec

import pytest

from shared.errors import MintError
from shared.tasks import TaskSet, load_task
from tests.unit.tasks.test_gym import gym
from tests.unit.tasks.test_taskset import nothing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning-gym"),
]

UNANSWERED = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Generators whose stored answer is none: their verifier accepts any solution and they keep none."""


async def test_every_generator_gives_prompts_answers_and_scores() -> None:
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - {"composite"})
    assert len(names) == 105
    places = asyncio.Semaphore(2)

    async def problem(name: str) -> str | None:
        async with places:
            try:
                task = await load_task(gym(name, size=4, held_out=0), nothing)
                return await _problem(name, task)
            except (ValueError, MintError) as error:
                return f"{name}: {error}"

    assert [found for found in await asyncio.gather(*map(problem, names)) if found] == []


async def _problem(name: str, task: TaskSet) -> str | None:
    items = await asyncio.to_thread(list, task.train_items)
    again = await asyncio.to_thread(lambda: [task.train_items[at] for at in (3, 2, 1, 0)])
    if items != again[::-1]:
        return f"{name}: items change with the order in which they are made"
    if not all(item.messages[0]["content"].strip() for item in items):
        return f"{name}: an empty prompt"
    own = await task.score_batch([(item, item.answer) for item in items])
    if name in UNANSWERED:
        if any(item.answer for item in items) or max(own) > 0.01:
            return f"{name}: it stores answers now, worth {own}"
    elif own != [1.0] * 4:
        return f"{name}: its own answers are worth {own}"
    odd = await task.score_batch(
        [(items[0], text) for text in ("", "no", "0", "[[", "{}", "9**9", "\ud800", "x" * 5000)]
    )
    return None if all(0 <= score <= 1 for score in odd) else f"{name}: scores outside 0 to 1: {odd}"
