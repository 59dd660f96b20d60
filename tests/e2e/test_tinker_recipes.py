"""Recipes that people have, on both generations of the public SDK, with SmolLM2 on the default stack: they finish, and
they learn. All of them as `python -m tinker_cookbook.recipes.…`, with what they measured read from `metrics.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.stack.bases import SMOLLM2_NAME
from tests.e2e.tinker_clients.clients import Client, Desk, client_python, write_tokenizer
from tests.stacks import StackProcess

pytest.importorskip("vllm")

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

# The older cookbook is on tinker itself, which mint brings.
OLDER, NEWER = Client("mint022", "tinker", "TINKER"), Client("tinker038", "tinker", "TINKER")
THREADS = {"MINT_LEARNER_THREADS": "2"}
"""These recipes sample nothing while they learn, so that the learner may have both of two cores."""
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
"""The newer cookbook asks for prices on the way; it finds a closed port, and goes on without."""
REWARD, NLL = "env/all/reward/total", "train_mean_nll"
RATE, STEPS, ENDS, GAIN = 5e-4, 20, 5, 0.05
TIMEOUT_S = 850

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def vllm_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackProcess]:
    found = StackProcess(tmp_path_factory.mktemp("recipes-stack") / "data", "vllm", env=THREADS)
    try:
        yield found.up()
    finally:
        found.down()


@pytest.fixture(scope="module")
def desks(vllm_stack: StackProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Desk]:
    work = tmp_path_factory.mktemp("recipes")
    write_tokenizer(work, SMOLLM2_NAME)
    url = vllm_stack.url
    return {
        client.name: Desk(client, vllm_stack, url, work, SMOLLM2_NAME, environment=OFFLINE) for client in (OLDER, NEWER)
    }


@pytest.fixture(params=[OLDER, NEWER], ids=[OLDER.name, NEWER.name])
def desk(desks: dict[str, Desk], request: pytest.FixtureRequest) -> Desk:
    return desks[request.param.name]


@pytest.fixture(scope="module")
def taught(desks: dict[str, Desk]) -> str:
    """The path of a state that was taught some sums, by the newer client."""
    found = desks[NEWER.name].run("teach_sums", SMOLLM2_NAME)
    assert found["nll"][-1] < found["nll"][0]
    return str(found["path"])


def test_the_guessing_game_finishes(desk: Desk, tmp_path: Path) -> None:
    sizes = {"group_size": 2, "batch_size": 1, "max_tokens": 8, "save_every": 0}
    (line,) = recipe(desk, "multiplayer_rl.guess_number.train", tmp_path / "log", 1, **sizes)
    assert REWARD in line


def test_the_preference_for_shorter_answers_finishes(desk: Desk, tmp_path: Path) -> None:
    sizes = {"batch_size": 2, "group_size": 4, "max_tokens": 8}
    (line,) = recipe(desk, "preference.shorter.train", tmp_path / "log", 1, **sizes)
    assert REWARD in line


def test_supervised_chats_are_learnt(desk: Desk, tmp_path: Path) -> None:
    """The same conversations in every epoch, so that their NLL can be compared."""
    dataset = tmp_path / "conversations.jsonl"
    dataset.write_text("".join(examples(desk.client)[:24]))
    sizes = {"batch_size": 8, "max_length": 128, "lora_rank": 8, "num_epochs": 3, "save_every": 0}
    lines = recipe(desk, "chat_sl.train", tmp_path / "log", 9, dataset=dataset, learning_rate=RATE, **sizes)
    first, _, last = (mean(lines[epoch : epoch + 3], NLL) for epoch in (0, 3, 6))
    assert last < first - 0.1


def test_the_arithmetic_recipe_learns(desks: dict[str, Desk], taught: str, tmp_path: Path) -> None:
    lines = arithmetic(desks[NEWER.name], tmp_path / "log", STEPS, taught, loss_fn="importance_sampling")
    rewards = [round(line[REWARD], 3) for line in lines]
    assert mean(lines[-ENDS:], REWARD) >= mean(lines[:ENDS], REWARD) + GAIN, rewards


def test_the_arithmetic_recipe_goes_on_from_what_the_other_generation_saved(
    desks: dict[str, Desk], taught: str, tmp_path: Path
) -> None:
    """The base model gets 1 in 100 right."""
    lines = arithmetic(desks[OLDER.name], tmp_path / "log", 2, taught)
    assert mean(lines, "env/all/correct") > 0.08, lines


def arithmetic(desk: Desk, log: Path, steps: int, state: str, **more: Any) -> Lines:
    sizes = {"group_size": 4, "groups_per_batch": 16, "max_tokens": 5, "lora_rank": 8, "save_every": 0}
    learning = {"learning_rate": RATE, "load_checkpoint_path": state, **more}
    return recipe(desk, "math_rl.train", log, steps, env="arithmetic", **sizes, **learning)


def recipe(desk: Desk, name: str, log: Path, steps: int, **settings: Any) -> Lines:
    """What it measured in each step; the newer cookbook ends with a line of sums."""
    fixed = {"model_name": SMOLLM2_NAME, "renderer_name": "qwen3_instruct", "eval_every": 0}
    chosen = {**fixed, "max_steps": steps, "log_path": log, **settings}
    arguments = [f"{key}={value}" for key, value in chosen.items()]
    desk.python("-m", f"tinker_cookbook.recipes.{name}", *arguments, timeout_s=TIMEOUT_S)
    found = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in found if REWARD in line or NLL in line]
    assert len(lines) == steps
    return lines


def examples(client: Client) -> list[str]:
    """The lines of the conversations that its cookbook ships."""
    venv = client_python(client).parents[1]
    (found,) = venv.glob("lib/python*/site-packages/tinker_cookbook/example_data/conversations.jsonl")
    return found.read_text().splitlines(keepends=True)


def mean(lines: Lines, name: str) -> float:
    return sum(line[name] for line in lines) / len(lines)
