"""Rewards that are installed as distributions of their own."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mint_schemas.training import ArithmeticTask, PluginReward

from shared.tasks import RewardError, TaskSet, load_task, scorer_name
from tests.unit.tasks.test_taskset import nothing

MODULE = """
def length(config):
    unit = config.get("unit", 1)
    if unit <= 0:
        raise ValueError("unit must be above 0")
    return lambda batch: [len(sample.completion) / unit for sample in batch]

def told(config):
    async def score(batch):
        asked = [s.id and s.prompt[-1]["content"].startswith("What is") for s in batch]
        return [float(s.completion == s.answer and a) for s, a in zip(batch, asked)]
    return score

class Late:
    async def __call__(self, batch):
        return [0.25 for _ in batch]

def late(config):
    return Late()

def broken(config):
    def score(batch):
        raise KeyError("weights")
    return score

def nan(config):
    return lambda batch: [float("nan") if sample.completion == "x" else 1.0 for sample in batch]

def short(config):
    return lambda batch: [1.0]

def none(config):
    return 5
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = ("length", "told", "late", "broken", "nan", "short", "none", "gone")
    about = tmp_path / "acme_rewards-2.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-rewards\nVersion: 2.1\n")
    entries = "\n".join(f"{name} = acme_rewards_for_tests:{name}" for name in names)
    (about / "entry_points.txt").write_text(f"[mint.rewards]\n{entries}\n")
    (tmp_path / "acme_rewards_for_tests.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("acme_rewards_for_tests", None)


async def task_with(name: str, **config: float) -> TaskSet:
    return await load_task(
        ArithmeticTask(kind="arithmetic", reward=PluginReward(kind="plugin", name=name, config=config)), nothing
    )


async def test_a_plugin_scores_a_batch_with_its_config() -> None:
    task = await task_with("length", unit=2)
    item = task.train_items[0]
    assert await task.score_batch([(item, "four"), (item, "")]) == [2.0, 0.0]


async def test_a_plugin_may_be_asynchronous_and_sees_the_item() -> None:
    task = await task_with("told")
    item = task.train_items[0]
    assert await task.score_batch([(item, item.answer), (item, "no")]) == [1.0, 0.0]
    late = await task_with("late")
    assert await late.score_batch([(item, "x")]) == [0.25]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r"the reward plugin:broken@2.1 failed on prompt \d+\+\d+: KeyError: 'weights'"),
        ("nan", r"the reward plugin:nan@2.1 gave nan on prompt \d+\+\d+"),
        ("short", r"on prompt .*: ValueError: 1 scores came for 2 completions"),
    ],
)
async def test_a_plugin_that_fails_names_the_prompt(name: str, message: str) -> None:
    task = await task_with(name)
    item = task.train_items[0]
    with pytest.raises(RewardError, match=message):
        await task.score_batch([(item, "y"), (item, "x")])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("polite", "no reward plugin 'polite' is installed here .*; there are: .*broken, gone, late, length"),
        ("gone", "the reward plugin 'gone' cannot be used: AttributeError"),
        ("none", "the reward plugin 'none' gave a int; its factory must return a function"),
        ("length", "the reward plugin 'length' cannot be used: ValueError: unit must be above 0"),
    ],
)
async def test_a_plugin_that_cannot_be_used_is_refused_in_words(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await task_with(name, unit=-1)


def test_a_plugins_name_holds_its_release_and_config() -> None:
    plain, other = (PluginReward(kind="plugin", name="length", config=c) for c in ({}, {"unit": 2}))
    assert scorer_name(plain) == "plugin:length@2.1"
    assert scorer_name(other).startswith("plugin:length@2.1:")
