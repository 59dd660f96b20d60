"""Recipes that people have, on both generations of the public SDK, with SmolLM2 on the default stack: they finish, and
they learn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.stack.bases import SMOLLM2_NAME
from tests.e2e.recipe_kit import NEWER, OLDER, SCRIPTS, Client, mean, working_directory
from tests.stacks import StackProcess

pytest.importorskip("vllm")

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

REWARD, NLL = "env/all/reward/total", "train_mean_nll"
THREADS = {"MINT_LEARNER_THREADS": "2"}
"""These recipes learn while nothing is sampled, so that the learner may have both of two cores."""
RATE, STEPS, ENDS = 5e-4, 20, 5
GAIN = 0.05


@pytest.fixture(scope="module")
def vllm_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackProcess]:
    found = StackProcess(tmp_path_factory.mktemp("recipes-stack") / "data", "vllm", env=THREADS)
    try:
        yield found.up()
    finally:
        found.down()


@pytest.fixture(scope="module")
def clients(vllm_stack: StackProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Client]:
    home = working_directory(tmp_path_factory.mktemp("recipes-home"))
    url = vllm_stack.url
    return {venv: Client(venv, url, home) for venv in (OLDER, NEWER)}


@pytest.fixture(scope="module")
def taught(clients: dict[str, Client]) -> str:
    """The path of a state that was taught some sums."""
    found = json.loads(clients[NEWER].script(SCRIPTS / "teach_sums.py", SMOLLM2_NAME).splitlines()[-1])
    assert found["nll"][-1] < found["nll"][0]
    return str(found["path"])


@pytest.mark.parametrize("venv", [OLDER, NEWER])
def test_the_guessing_game_finishes(clients: dict[str, Client], venv: str, tmp_path: Path) -> None:
    lines = clients[venv].recipe(
        "multiplayer_rl.guess_number.train",
        tmp_path / "log",
        group_size=2,
        batch_size=2,
        max_tokens=8,
        max_steps=1,
        eval_every=0,
        save_every=0,
    )
    assert len(lines) == 1
    assert REWARD in lines[0]


@pytest.mark.parametrize("venv", [OLDER, NEWER])
def test_the_preference_for_shorter_answers_finishes(clients: dict[str, Client], venv: str, tmp_path: Path) -> None:
    lines = clients[venv].recipe(
        "preference.shorter.train",
        tmp_path / "log",
        batch_size=2,
        group_size=4,
        max_tokens=8,
        max_steps=1,
        eval_every=0,
    )
    assert len(lines) == 1
    assert REWARD in lines[0]


@pytest.mark.parametrize("venv", [OLDER, NEWER])
def test_supervised_chats_are_learnt(clients: dict[str, Client], venv: str, tmp_path: Path) -> None:
    """The same conversations in every epoch, so that their NLL can be compared."""
    examples = clients[venv].example("conversations.jsonl").read_text().splitlines(keepends=True)
    dataset = tmp_path / "conversations.jsonl"
    dataset.write_text("".join(examples[:24]))
    lines = clients[venv].recipe(
        "chat_sl.train",
        tmp_path / "log",
        dataset=dataset,
        batch_size=8,
        max_length=512,
        lora_rank=8,
        learning_rate=RATE,
        num_epochs=3,
        eval_every=0,
        save_every=0,
    )
    first, _, last = (lines[epoch : epoch + 3] for epoch in (0, 3, 6))
    assert len(lines) == 9
    assert mean(last, NLL) < mean(first, NLL) - 0.1


def test_the_arithmetic_recipe_learns(clients: dict[str, Client], taught: str, tmp_path: Path) -> None:
    lines = clients[NEWER].recipe(
        "math_rl.train", tmp_path / "log", **arithmetic(taught, STEPS), loss_fn="importance_sampling"
    )
    rewards = [round(line[REWARD], 3) for line in lines]
    assert len(lines) == STEPS
    assert mean(lines[-ENDS:], REWARD) >= mean(lines[:ENDS], REWARD) + GAIN, rewards


def test_the_arithmetic_recipe_goes_on_from_a_state_that_the_other_generation_saved(
    clients: dict[str, Client], taught: str, tmp_path: Path
) -> None:
    lines = clients[OLDER].recipe("math_rl.train", tmp_path / "log", **arithmetic(taught, 2))
    assert len(lines) == 2
    assert all(line["env/all/correct"] > 0.05 for line in lines), lines


def arithmetic(state: str, steps: int) -> dict[str, object]:
    return {
        "env": "arithmetic",
        "group_size": 4,
        "groups_per_batch": 16,
        "max_tokens": 5,
        "lora_rank": 8,
        "learning_rate": RATE,
        "load_checkpoint_path": state,
        "max_steps": steps,
        "eval_every": 0,
        "save_every": 0,
    }
