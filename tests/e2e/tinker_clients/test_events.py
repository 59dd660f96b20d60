"""A revision that a run of events made is opened by both public clients, trained on, and saved as one of theirs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e import method_specs as specs
from tests.e2e.runs import Runs
from tests.e2e.tinker_clients.clients import Desk
from tests.e2e.tinker_clients.numbers import TOLERANCE, apart, behind_first
from tests.stacks import StackProcess
from tests.tiny import TINY_NAME

LORA = {"rank": 8, "alpha": 32.0, "target_modules": specs.ALL_MODULES}


@pytest.fixture(scope="module")
def run_by_events(shared_stack: StackProcess) -> dict[str, Any]:
    with Runs(shared_stack) as runs:
        chats = runs.put(specs.SEED_CHATS, tenant="local")
        run = runs.completed(runs.start("local/by-events", specs.seed_sft(chats), key="by-events", lora=LORA))
        return {**run, "last": runs.revisions("local/by-events")[-1]}


@pytest.fixture(scope="module")
def seen(desk: Desk, run_by_events: dict[str, Any]) -> Any:
    run, step = run_by_events["run_id"], run_by_events["last"]["step"]
    return desk.run("events", f"tinker://{run}/weights/{step}", f"tinker://{run}/sampler_weights/{step}")


def test_it_is_described_as_any_checkpoint(seen: Any) -> None:
    assert seen["info"] == [TINY_NAME, 8, True, True, False]


def test_training_begins_where_the_run_ended(seen: Any) -> None:
    bare, whole = seen["at_start"]
    assert apart(bare, whole) == 0
    assert apart(behind_first(seen["sampled"]), bare) <= TOLERANCE
    assert apart(bare, seen["base"]) > 0.01


def test_its_optimizer_comes_along_where_it_is_asked_for(seen: Any) -> None:
    bare, whole = seen["after"]
    assert apart(whole, seen["at_start"][1]) > 0.003
    assert apart(bare, whole) > 1e-5


def test_what_is_trained_further_is_saved_as_a_revision(seen: Any) -> None:
    assert apart(behind_first(seen["onward"]), seen["after"][1]) <= TOLERANCE
