"""Draws, scores and digests of tasks."""

import hashlib
import math
from collections.abc import Callable

import pytest
from mint_schemas.common import FileRef
from mint_schemas.training import (
    ArithmeticTask,
    ExactMatch,
    JsonlMessages,
    JsonlPrompts,
    PluginReward,
    Regex,
    Reward,
    TaskDemonstrations,
    WebhookReward,
)

from shared.errors import Fatal
from shared.tasks import (
    RewardError,
    TaskItem,
    TaskLoader,
    TaskSet,
    demonstrations,
    load_demonstrations,
    load_task,
    task_digest,
)
from shared.tasks.load import Read
from shared.tasks.permutation import Permutation

SUMS = ArithmeticTask(kind="arithmetic", max_operand=20)
FILE = FileRef(key="data/acme/x", sha256="a" * 64, size=3)


async def nothing(ref: FileRef) -> bytes:
    raise AssertionError(f"{ref.key} must not be read")


def reader(data: bytes) -> Read:
    async def read(ref: FileRef) -> bytes:
        return data

    return read


def prompts(n: int) -> bytes:
    return "".join(f'{{"prompt": "p{i}", "answer": "{i}"}}\n' for i in range(n)).encode()


@pytest.mark.parametrize("size", [1, 2, 3, 10, 441, 1000])
def test_a_permutation_visits_each_place_once(size: int) -> None:
    permutation = Permutation(size, "key")
    assert sorted(permutation[i] for i in range(size)) == list(range(size))
    if size > 9:
        assert [permutation[i] for i in range(size)] != [Permutation(size, "other")[i] for i in range(size)]


@pytest.mark.parametrize("max_operand", [9, 20, 99])
async def test_train_and_held_out_sums_are_disjoint_and_complete(max_operand: int) -> None:
    task = await load_task(ArithmeticTask(kind="arithmetic", max_operand=max_operand), nothing)
    train, held_out = {i.id for i in task.train_items}, {i.id for i in task.held_out_items}
    assert not train & held_out
    assert len(train) + len(held_out) == (max_operand + 1) ** 2
    assert len(held_out) == (max_operand + 1) ** 2 // 5


async def test_a_sum_is_asked_and_answered() -> None:
    task = await load_task(SUMS, nothing)
    item = task.train_items[0]
    a, b = map(int, item.id.split("+"))
    assert item.messages == ({"role": "user", "content": f"What is {a}+{b}?"},)
    assert item.answer == str(a + b)
    assert demonstrations(task)[0] == (*item.messages, {"role": "assistant", "content": str(a + b)})
    assert len(demonstrations(task)) == len(task.train_items)
    assert len(demonstrations(task)[3:7]) == 4


async def test_a_hundred_million_sums_are_drawn_without_listing_them() -> None:
    task = await load_task(ArithmeticTask(kind="arithmetic", max_operand=9999), nothing)
    assert len(task.train_items) == 80_000_000
    assert len({item.id for item in task.held_out(100)}) == 100


async def test_steps_cover_the_train_items_once_an_epoch() -> None:
    task = await load_task(SUMS, nothing)
    size = len(task.train_items)
    drawn = [item.id for step in range(1, size + 1) for item in task.step_items(5, step, 3)]
    for epoch in range(3):
        assert len(set(drawn[epoch * size : (epoch + 1) * size])) == size
    assert drawn[:size] != drawn[size : 2 * size]


async def test_a_step_depends_on_seed_and_number_alone() -> None:
    one, other = await load_task(SUMS, nothing), await load_task(SUMS, nothing)
    assert one.step_items(1, 7, 12) == other.step_items(1, 7, 12)
    assert one.step_items(1, 7, 12) != one.step_items(2, 7, 12)
    assert one.step_items(1, 7, 12) != one.step_items(1, 8, 12)


async def test_held_out_items_are_the_same_ones_each_time() -> None:
    task = await load_task(SUMS, nothing)
    assert list(task.held_out(10)) == (await load_task(SUMS, nothing)).held_out(40)[:10]
    assert len(task.held_out(100_000)) == len(task.held_out_items)
    trained = {item.id for step in range(1, 40) for item in task.step_items(0, step, 12)}
    assert not trained & {item.id for item in task.held_out(100_000)}


async def test_prompts_of_a_file_are_split_by_the_prompt() -> None:
    task = await load_task(JsonlPrompts(kind="jsonl", data=FILE), reader(prompts(1000)))
    assert 150 < len(task.held_out_items) < 250
    assert len(task.train_items) + len(task.held_out_items) == 1000
    doubled = await load_task(JsonlPrompts(kind="jsonl", data=FILE), reader(prompts(1000) * 2))
    train = {item.messages[0]["content"] for item in doubled.train_items}
    assert not train & {item.messages[0]["content"] for item in doubled.held_out_items}


async def test_more_prompts_than_items_repeat_them() -> None:
    task = await load_task(JsonlPrompts(kind="jsonl", data=FILE, held_out=0), reader(prompts(2)))
    assert sorted(item.id for item in task.step_items(0, 1, 4)) == ["line-1", "line-1", "line-2", "line-2"]


async def test_an_empty_side_is_refused_in_words() -> None:
    task = await load_task(JsonlPrompts(kind="jsonl", data=FILE, held_out=0), reader(prompts(2)))
    with pytest.raises(ValueError, match="no held-out items"):
        task.held_out(1)
    empty = TaskSet((), (), lambda c, a: 0.0, "x", "y")
    with pytest.raises(ValueError, match="no train items"):
        empty.step_items(0, 1, 1)


def test_the_digest_is_stable_and_tells_tasks_apart() -> None:
    content = b'{"kind":"arithmetic","max_operand":20,"split":1}'
    assert task_digest(SUMS) == hashlib.sha256(content).hexdigest()
    digests = {
        task_digest(SUMS),
        task_digest(ArithmeticTask(kind="arithmetic")),
        task_digest(JsonlPrompts(kind="jsonl", data=FILE)),
        task_digest(JsonlPrompts(kind="jsonl", data=FILE, held_out=0.5)),
        task_digest(JsonlPrompts(kind="jsonl", data=FILE.model_copy(update={"sha256": "b" * 64}))),
    }
    assert len(digests) == 5


def test_the_digest_names_the_prompts_not_where_they_lie_nor_the_reward() -> None:
    one = JsonlPrompts(kind="jsonl", data=FILE)
    moved = JsonlPrompts(kind="jsonl", data=FILE.model_copy(update={"key": "data/other/x"}))
    rewarded = JsonlPrompts(kind="jsonl", data=FILE, reward=Regex(kind="regex", pattern="x"))
    assert task_digest(one) == task_digest(moved) == task_digest(rewarded)


def raises(completion: str, answer: str) -> float:
    raise ZeroDivisionError("boom")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (raises, "failed on prompt line-7: ZeroDivisionError: boom"),
        (lambda c, a: math.nan, "gave nan on prompt line-7"),
        (lambda c, a: math.inf, "gave inf on prompt line-7"),
        (lambda c, a: "much", "failed on prompt line-7: ValueError"),
    ],
)
def test_a_broken_reward_names_the_prompt(reward: Callable[[str, str], float], message: str) -> None:
    task = TaskSet((), (), reward, "mine", "y")
    with pytest.raises(RewardError, match=message) as caught:
        task.score(TaskItem("line-7", (), "1"), "1")
    assert isinstance(caught.value, Fatal)


async def test_demonstrations_come_from_a_task_or_a_file() -> None:
    of_task = await load_demonstrations(TaskDemonstrations(kind="task", task=SUMS), nothing)
    assert of_task[0][-1]["role"] == "assistant"
    line = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    of_file = await load_demonstrations(JsonlMessages(kind="jsonl", data=FILE), reader(line))
    assert list(of_file) == [({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})]


@pytest.mark.parametrize(
    "reward",
    [
        WebhookReward(kind="webhook", url="http://judge.example/"),
        PluginReward(kind="plugin", name="installed-elsewhere"),
    ],
)
@pytest.mark.parametrize("kind", ["arithmetic", "jsonl"])
async def test_demonstrations_of_a_task_do_not_need_its_reward(kind: str, reward: Reward) -> None:
    lines = JsonlPrompts(kind="jsonl", data=FILE, held_out=0, reward=reward)
    task = lines if kind == "jsonl" else SUMS.model_copy(update={"reward": reward})
    chats = await load_demonstrations(TaskDemonstrations(kind="task", task=task), reader(prompts(3)))
    plain = task.model_copy(update={"reward": ExactMatch()})
    assert list(chats) == list(demonstrations(await load_task(plain, reader(prompts(3)))))


async def test_a_worker_reads_a_task_once_and_forgets_old_ones() -> None:
    reads: list[str] = []

    async def read(ref: FileRef) -> bytes:
        reads.append(ref.key)
        return prompts(3)

    loader = TaskLoader(read, keep=2)
    tasks = [JsonlPrompts(kind="jsonl", data=FILE.model_copy(update={"key": f"data/t/{i}"})) for i in range(3)]
    for i in (0, 1, 0, 2, 0, 1):
        await loader.load(tasks[i])
    assert reads == ["data/t/0", "data/t/1", "data/t/2", "data/t/1"]


async def test_a_worker_fails_for_good_on_bad_data() -> None:
    with pytest.raises(Fatal, match="the jsonl task cannot be used: line 2 is not JSON"):
        await TaskLoader(reader(prompts(1) + b"{")).load(JsonlPrompts(kind="jsonl", data=FILE))


async def test_scores_of_the_default_reward_are_exact_match() -> None:
    task = await load_task(SUMS.model_copy(update={"reward": ExactMatch()}), nothing)
    item = task.train_items[0]
    assert task.scorer == "exact_match"
    assert task.score(item, f" {item.answer}\n") == 1.0
    assert task.score(item, f"{item.answer}.") == 0.0
