"""Verifiers that evaluate a completion read data and formulas, as before, and run nothing."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest
from mint_schemas.training import ReasoningGym

from shared.tasks.gym import Gym
from shared.tasks.maths import MathReward
from shared.tasks.reward import Sample

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning-gym")


@pytest.fixture(scope="module")
def gym() -> Gym:
    return Gym(ReasoningGym(kind="reasoning_gym", name="string_insertion", size=20), 1)


def scored(gym: Gym, *completions: str) -> list[float]:
    item = gym.train_items[0]
    samples = [Sample(item.id, item.messages, text or item.answer, item.answer, item.place) for text in completions]
    return asyncio.run(gym.scores(samples))


PROGRAMS = [
    "[__import__('os').system('touch {mark}')]",
    "[setattr(type(self),'score_answer',lambda *a: 1.0)]",
    "__import__('time').sleep(600)",
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_verifier_that_evaluates_reads_data_only(gym: Gym, tmp_path: Path, program: str) -> None:
    mark = tmp_path / "mark"
    text = f"<answer>{program.format(mark=mark)}</answer>"
    assert scored(gym, text, "wrong", "") == [0.0, 0.0, 1.0]
    assert not mark.exists()


def test_data_is_read_as_before(gym: Gym) -> None:
    item = gym.train_items[0]
    assert scored(gym, f"<answer>{list(item.answer)}</answer>") == [0.1]


def test_formulas_are_read_as_before_and_nothing_else() -> None:
    gym = Gym(ReasoningGym(kind="reasoning_gym", name="simple_integration", size=20), 1)
    item = gym.train_items[0]
    assert scored(gym, item.answer, f"{item.answer} + sin(0) + sqrt(0)") == [1.0, 1.0]
    calls = ["__import__('time').sleep(600)", "sympify(chr(49))", "eval(chr(49))", "open(chr(49))", "x.func(1)"]
    assert scored(gym, *calls) == [0.0] * 5


@pytest.mark.parametrize(
    "text", ["1+__import__('os').system('touch {mark}')", "$__import__('os').system('touch {mark}')$"]
)
def test_mathematics_runs_no_program(tmp_path: Path, text: str) -> None:
    mark = tmp_path / "mark"
    assert MathReward(1)(text.format(mark=mark), "5") == 0.0
    assert not mark.exists()
