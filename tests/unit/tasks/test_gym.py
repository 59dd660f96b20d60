"""Generators of reasoning-gym as tasks. The library is an optional extra (`make reasoning-gym`)."""

import asyncio
import math
import signal
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import pytest
from mint_schemas.training import ReasoningGym, TaskDemonstrations

import shared.tasks.gym
import shared.tasks.load
from shared.tasks import RewardError, TaskItem, TaskSet, load_demonstrations, load_task, task_digest
from shared.tasks.hosted import HostError
from shared.tasks.jsonl import is_held_out
from tests.unit.tasks.test_taskset import nothing

needs_library = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning-gym")


def gym(name: str, **changes: object) -> ReasoningGym:
    return ReasoningGym.model_validate({"kind": "reasoning_gym", "name": name, "size": 20} | changes)


async def load(name: str, **changes: object) -> TaskSet:
    return await load_task(gym(name, **changes), nothing)


def every_prompt(task: TaskSet) -> tuple[list[str], list[str]]:
    train, held_out = (
        [item.messages[0]["content"] for item in side] for side in (task.train_items, task.held_out_items)
    )
    return train, held_out


@needs_library
async def test_items_are_the_generators_and_scores_its_verifiers() -> None:
    from reasoning_gym import create_dataset

    task, generator = await load("chain_sum", seed=7), create_dataset("chain_sum", size=20, seed=7)
    assert (len(task.train_items), len(task.held_out_items)) == (16, 4)
    own = [item for item in task.train_items if "." not in item.id]
    assert len(own) > 8
    for item in own:
        entry = generator[item.place]
        assert item.id == f"chain_sum-{item.place}"
        assert (item.messages, item.answer) == (({"role": "user", "content": entry["question"]},), entry["answer"])
    item, entry = own[0], generator[own[0].place]
    completions = [item.answer, f"I think <answer>{item.answer}</answer>", f"it is {item.answer}", "none", ""]
    said = [item.answer, item.answer, f"it is {item.answer}", "none", ""]
    scores = await task.score_batch([(item, completion) for completion in completions])
    assert scores == [generator.score_answer(text, entry) for text in said]
    assert scores[:2] == [1.0, 1.0] != scores[2:4]
    assert task.scorer == f"reasoning_gym:chain_sum@{version('reasoning-gym')}"


@needs_library
@pytest.mark.parametrize("name", ["isomorphic_strings", "word_ladder", "gsm_symbolic"])
async def test_items_are_the_same_in_any_process_and_order(name: str) -> None:
    """Some generators draw from sets, whose order changes from process to process."""
    one, other = await load(name), await load(name)
    backwards = [other.train_items[at] for at in reversed(range(16))]
    assert list(one.train_items) == backwards[::-1]
    assert one.sha256 == other.sha256


@needs_library
@pytest.mark.parametrize("seed", [0, 1])
async def test_no_prompt_is_on_both_sides_even_if_the_generator_repeats_itself(seed: int) -> None:
    task = await load("coin_flip", size=400, seed=seed, config={"min_trials": 3, "max_trials": 3}, held_out=0.3)
    train, held_out = every_prompt(task)
    assert (len(train), len(held_out)) == (280, 120)
    assert not set(train) & set(held_out)


@needs_library
async def test_sides_stay_apart_between_seeds() -> None:
    (train, _), (_, held_out) = [
        every_prompt(await load("chain_sum", size=200, seed=seed, config={"max_digits": 1, "max_terms": 2}))
        for seed in (0, 1)
    ]
    assert len(set(train)) < 160
    assert not set(train) & set(held_out)


@needs_library
async def test_a_generator_with_too_few_prompts_to_hold_any_out_says_so() -> None:
    task = await load(
        "chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, held_out=1e-9
    )
    with pytest.raises(
        ValueError, match=r"so few different prompts \(200 in \d+ tries\) that none is there to evaluate on"
    ):
        await asyncio.to_thread(list, task.held_out_items)


@needs_library
async def test_a_small_held_out_share_is_searched_for_as_long_as_it_takes() -> None:
    """The first 1000 prompts hold none with a chance of 0.37, the first 20000 with one of 2e-9."""
    task = await load("gcd", size=2000, held_out=0.001)
    items = await asyncio.to_thread(list, task.held_out(256))
    assert len(items) == 2
    assert all(is_held_out(item, 0.001) for item in items)
    assert max(item.place for item in items) > 1000 * 2000


@needs_library
async def test_a_share_too_small_to_be_found_in_time_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.tasks.gym, "TRIES_S", 0.2)
    task = await load("chain_sum", config={"min_digits": 9, "max_digits": 9}, held_out=1e-9)
    with pytest.raises(
        ValueError, match=r"is among the share of 1e-09 to evaluate on; bring held_out nearer to a half"
    ):
        await asyncio.to_thread(list, task.held_out_items)


@needs_library
async def test_few_prompts_are_named_as_the_cause_where_nearly_all_are_held_out() -> None:
    task = await load("gcd", held_out=0.9, config={"min_numbers": 2, "max_numbers": 2, "min_value": 7, "max_value": 8})
    with pytest.raises(ValueError, match=r"so few different prompts \(4 in \d+ tries\) that none is there to train on"):
        await asyncio.to_thread(list, task.train_items)


@needs_library
async def test_nothing_is_held_out_where_nothing_should_be() -> None:
    task = await load("chain_sum", held_out=0)
    assert [item.id for item in task.train_items] == [f"chain_sum-{i}" for i in range(20)]
    with pytest.raises(ValueError, match="no held-out items"):
        task.held_out(3)


@needs_library
@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("chain_sums", {}, "there is no generator 'chain_sums'; near are chain_sum"),
        ("composite", {}, "composite mixes other generators by a nested configuration; name one of the others"),
        ("chain_sum", {"min_term": 3}, "chain_sum has no setting 'min_term'; it has min_terms, max_terms"),
        ("chain_sum", {"size": 3}, "no setting 'size'; .*; size and seed are fields of the task"),
        ("chain_sum", {"min_terms": 9, "max_terms": 3}, "refuses this config: AssertionError: max_terms must be"),
        ("chain_sum", {"min_terms": "many"}, "refuses this config: TypeError"),
    ],
)
async def test_what_a_generator_does_not_take_is_refused_in_words(name: str, config: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await load(name, config=config)


@needs_library
async def test_a_config_that_asks_for_too_much_stays_in_its_bounds() -> None:
    with pytest.raises(ValueError, match="more than 2048 MiB"):
        await load("count_primes", config={"min_n": 10**11, "max_n": 10**12})


@needs_library
async def test_a_config_reaches_the_generator() -> None:
    task = await load("chain_sum", config={"min_terms": 5, "max_terms": 5})
    assert all(
        item.messages[0]["content"].count("+") + item.messages[0]["content"].count("-") >= 4
        for item in task.train_items
    )
    await load("basic_arithmetic", config={"operators": ["+"]})


@needs_library
async def test_a_completion_that_the_verifier_cannot_read_is_worth_nothing() -> None:
    """Its own verifier raises on a text that holds no numbers."""
    task = await load("prime_factorization")
    assert await task.score_batch([(task.train_items[0], "no"), (task.train_items[0], "[[")]) == [0.0, 0.0]


@needs_library
async def test_a_verifier_without_a_number_names_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    task = await load("chain_sum")
    item = task.train_items[2]
    monkeypatch.setattr(task.reward, "_host", Answering({"score": math.nan}))
    with pytest.raises(RewardError, match=rf"gave nan on prompt {item.id}"):
        await task.score_batch([(item, "1")])
    monkeypatch.setattr(task.reward, "_host", Answering(HostError("it took more than 30 s", over=True)))
    assert await task.score_batch([(item, "1")]) == [0.0]
    monkeypatch.setattr(task.reward, "_host", Answering(HostError("IndexError: gone")))
    with pytest.raises(RewardError, match=rf"failed on prompt {item.id}: HostError: IndexError: gone"):
        await task.score_batch([(item, "1")])


@needs_library
def test_its_processes_end_with_it() -> None:
    made = shared.tasks.gym.Gym(gym("chain_sum"), 1)
    processes = [child.process for child in made._host._idle]
    assert [process.poll() for process in processes] == [None]
    del made
    assert [process.wait(20) for process in processes] == [-signal.SIGKILL]


class Answering:
    def __init__(self, answer: object) -> None:
        self._answer = answer

    def ask(self, request: object) -> object:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@needs_library
@pytest.mark.parametrize("name", ["graph_color", "rubiks_cube"])
async def test_demonstrations_are_refused_where_no_answer_is_stored(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} stores no answer \(item {name}-\d+"):
        await load_demonstrations(TaskDemonstrations(kind="task", task=gym(name)), nothing)


async def test_demonstrations_are_refused_where_the_stored_answer_is_worth_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def unworthy(task: object, read: object) -> TaskSet:
        item = TaskItem("odd-3", ({"role": "user", "content": "p"},), "1")
        return TaskSet([item], (), lambda completion, answer: 0.0, "mine", "y")

    monkeypatch.setattr(shared.tasks.load, "load_task", unworthy)
    with pytest.raises(ValueError, match=r"odd scores its own stored answer 0 \(item odd-3\)"):
        await load_demonstrations(TaskDemonstrations(kind="task", task=gym("odd")), nothing)


@needs_library
async def test_demonstrations_answer_the_train_items() -> None:
    chats = await load_demonstrations(TaskDemonstrations(kind="task", task=gym("chain_sum")), nothing)
    assert len(chats) == 16
    assert (chats[3].name.split("-")[0], chats[3][-1]["role"]) == ("chain_sum", "assistant")


async def test_a_tasks_demonstrations_have_no_turns_to_choose() -> None:
    with pytest.raises(ValueError, match="train_on is chosen, but a task's demonstrations carry no weights"):
        await load_demonstrations(TaskDemonstrations(kind="task", task=gym("chain_sum")), nothing, "chosen")


@needs_library
def test_the_digest_tells_generators_settings_and_releases_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [gym("chain_sum"), gym("chain_sum", seed=1), gym("chain_sum", size=21), gym("chain_sum", held_out=0.1)]
    tasks += [gym("ab"), gym("chain_sum", config={"max_terms": 9})]
    digests = {task_digest(task) for task in tasks}
    assert len(digests) == len(tasks)
    monkeypatch.setattr(shared.tasks.gym, "version", lambda name: "9.9")
    assert task_digest(tasks[0]) not in digests


async def test_without_the_library_the_task_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(shared.tasks.gym, "version", missing)
    with pytest.raises(ValueError, match=r"reasoning_gym 'chain_sum' needs the optional library .*make reasoning-gym"):
        await load("chain_sum")
    with pytest.raises(ValueError, match=r"requirements-reasoning-gym\.lock"):
        task_digest(gym("chain_sum"))
