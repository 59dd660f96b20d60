"""What both public clients end is over: an unloaded model, and the models of a closed session."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.runs import Runs
from tests.e2e.tinker_clients.clients import Desk
from tests.e2e.tinker_clients.numbers import TOLERANCE, apart, policy_of

VERSIONS = {"tinker": "0.38.0", "mint": "0.2.0"}


@pytest.fixture(scope="module")
def seen(desk: Desk) -> Any:
    return desk.run("endings")


def state_of(desk: Desk, model_id: str) -> str:
    with Runs(desk.stack) as runs:
        (run,) = runs.get("runs", policy=policy_of(model_id))["items"]
    return str(run["state"])


def test_the_client_is_the_published_one(seen: Any, desk: Desk) -> None:
    assert seen["version"] == VERSIONS[desk.client.sdk]


def test_an_unloaded_model_takes_no_more_and_its_run_is_over(seen: Any, desk: Desk) -> None:
    unloaded = seen["unloaded"]
    assert unloaded["names"] == [unloaded["model_id"]] * 2
    assert unloaded["after"] is not None
    assert "unloaded" in unloaded["after"]["message"]
    assert unloaded["run"] == unloaded["model_id"]
    assert state_of(desk, unloaded["model_id"]) == "completed"


def test_what_an_unloaded_model_saved_stays(seen: Any) -> None:
    unloaded = seen["unloaded"]
    assert apart(unloaded["again"], unloaded["before"]) <= TOLERANCE
    assert unloaded["sampled"] > 1


def test_closing_a_session_unloads_its_models(seen: Any, desk: Desk) -> None:
    if desk.client.sdk == "mint":
        assert seen["closed"] is None  # its client cannot close
    else:
        assert state_of(desk, seen["closed"]) == "completed"
