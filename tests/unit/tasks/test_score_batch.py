"""Scoring a batch: order, bounds, errors that name the prompt, and an end when it is no longer wanted."""

import asyncio
import math
import threading
import time
from collections.abc import Sequence

import pytest

from shared.errors import Retryable
from shared.tasks import RewardError, RewardSettings, TaskItem, TaskLoader, TaskSet, taskset
from shared.tasks.reward import BatchReward, OneByOne, Sample
from tests.unit.tasks.test_taskset import SUMS, nothing

ITEMS = [TaskItem(f"line-{i}", ({"role": "user", "content": f"p{i}"},), str(i)) for i in range(10)]


def task_of(reward: OneByOne | BatchReward, at_once: int = 4) -> TaskSet:
    return TaskSet((), (), reward, "mine", "y", asyncio.Semaphore(at_once))


class Batches:
    """Scores by the answer; keeps the sizes that it was asked for and how many calls ran at once."""

    def __init__(self, batch_size: int | None, wrong: object = None) -> None:
        self.batch_size, self.wrong = batch_size, wrong
        self.sizes: list[int] = []
        self.now = self.most = 0

    async def scores(self, samples: Sequence[Sample]) -> Sequence[float]:
        self.sizes.append(len(samples))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.005)
        self.now -= 1
        if isinstance(self.wrong, Exception):
            raise self.wrong
        return [float(s.answer) if s.id != "line-7" or self.wrong is None else self.wrong for s in samples]  # type: ignore[misc]


@pytest.mark.parametrize(("batch_size", "sizes"), [(None, [10]), (4, [2, 4, 4]), (1, [1] * 10), (64, [10])])
async def test_a_batch_is_cut_to_what_the_reward_takes_and_keeps_its_order(
    batch_size: int | None, sizes: list[int]
) -> None:
    reward = Batches(batch_size)
    assert await task_of(reward).score_batch([(item, "x") for item in ITEMS]) == [float(i) for i in range(10)]
    assert sorted(reward.sizes) == sizes
    assert reward.most == min(4, len(sizes))


async def test_a_plain_reward_runs_in_threads_at_most_so_many_at_once() -> None:
    lock, now, most, threads = threading.Lock(), 0, 0, set()

    def reward(completion: str, answer: str) -> float:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
            threads.add(threading.current_thread())
        time.sleep(0.005)
        with lock:
            now -= 1
        return float(completion == answer)

    batch = [(item, "3") for item in ITEMS]
    assert await task_of(reward, 3).score_batch(batch) == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert most == 3
    assert threading.main_thread() not in threads


async def test_one_bound_holds_for_every_task_of_a_worker() -> None:
    loader = TaskLoader(nothing, RewardSettings(concurrency=1))
    one, other = await loader.load(SUMS), await loader.load(SUMS.model_copy(update={"max_operand": 30}))
    assert one.places is other.places is not None
    assert one.places._value == 1


async def test_an_empty_batch_has_no_scores() -> None:
    assert await task_of(Batches(4)).score_batch([]) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (math.nan, "the reward mine gave nan on prompt line-7"),
        (-math.inf, "the reward mine gave -inf on prompt line-7"),
        (None.__class__, "the reward mine failed on prompt line-7: TypeError"),
        (10**400, "the reward mine failed on prompt line-7: OverflowError"),
        (KeyError("x"), r"the reward mine failed on prompt line-4, line-5 … \(4 prompts\): KeyError: 'x'"),
    ],
)
async def test_a_broken_reward_names_the_prompt(wrong: object, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        await task_of(Batches(4, wrong)).score_batch([(item, "x") for item in ITEMS[4:]])


async def test_too_few_scores_are_an_error() -> None:
    class Short(Batches):
        async def scores(self, samples: Sequence[Sample]) -> Sequence[float]:
            return [1.0]

    with pytest.raises(RewardError, match=r"prompt line-0, line-1 .*: ValueError: 1 scores came for 2 completions"):
        await task_of(Short(None)).score_batch([(item, "x") for item in ITEMS[:2]])


async def test_what_may_go_away_stays_retryable() -> None:
    with pytest.raises(Retryable, match="away"):
        await task_of(Batches(4, Retryable("away"))).score_batch([(item, "x") for item in ITEMS])


async def test_a_batch_that_is_no_longer_wanted_ends() -> None:
    class Endless(Batches):
        ended = 0

        async def scores(self, samples: Sequence[Sample]) -> Sequence[float]:
            try:
                await asyncio.Event().wait()
            finally:
                self.ended += 1
            raise AssertionError

    reward = Endless(5)
    task = task_of(reward)
    scoring = asyncio.create_task(task.score_batch([(item, "x") for item in ITEMS]))
    await asyncio.sleep(0.01)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert reward.ended == 2
    assert task.places is not None
    assert task.places._value == 4


@pytest.mark.parametrize("at_once", [0, 4], ids=["waiting for a place", "being scored"])
async def test_a_batch_ends_when_the_check_says_so(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """A lease that is lost ends one long call too, and one that has not begun."""
    monkeypatch.setattr(taskset, "CHECK_EVERY_S", 0.001)
    ended = []

    class Endless(Batches):
        async def scores(self, samples: Sequence[Sample]) -> Sequence[float]:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(len(samples))
            raise AssertionError

    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 3:
            raise Retryable("the lease is lost")

    task = task_of(Endless(5), at_once)
    with pytest.raises(Retryable, match="the lease is lost"):
        await task.score_batch([(item, "x") for item in ITEMS], check)
    assert ended == [5] * (2 if at_once else 0)
    assert task.places is not None
    assert task.places._value == at_once


async def test_a_reward_of_batches_is_not_asked_one_by_one() -> None:
    with pytest.raises(TypeError, match="mine scores batches"):
        task_of(Batches(None)).score(ITEMS[0], "x")
