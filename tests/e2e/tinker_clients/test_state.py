"""Both public clients save state and go on from it: exactly, with its optimizer; else with its weights alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.tinker_clients.clients import Desk
from tests.e2e.tinker_clients.numbers import TOLERANCE, apart

APART = 0.003
"""Two models that were trained differently are further apart than this."""


@pytest.fixture(scope="module")
def seen(desk: Desk) -> Any:
    return desk.run("state")


def test_a_saved_state_is_a_path_of_its_model(seen: Any) -> None:
    assert seen["path"] == f"tinker://{seen['model_id']}/weights/two"
    assert apart(seen["fresh"], seen["at_two"]) > APART


def test_with_its_optimizer_training_goes_on_as_if_never_interrupted(seen: Any) -> None:
    assert seen["resumed"]["model_id"] != seen["model_id"]
    assert apart(seen["resumed"]["at_two"], seen["at_two"]) <= TOLERANCE
    assert apart(seen["resumed"]["at_four"], seen["at_four"]) <= TOLERANCE
    assert apart(seen["whole_at_four"], seen["at_four"]) <= TOLERANCE


def test_without_it_the_weights_are_the_same_and_the_next_steps_are_not(seen: Any) -> None:
    assert apart(seen["bare"]["at_two"], seen["at_two"]) <= TOLERANCE
    assert apart(seen["back_at_two"], seen["at_two"]) <= TOLERANCE
    assert apart(seen["bare"]["at_four"], seen["at_four"]) > APART


def test_a_taken_name_is_refused_and_overwrite_moves_it(seen: Any) -> None:
    taken = seen["taken"]
    assert taken["refused"]["category"] == "user"
    assert "weights/two" in taken["refused"]["message"]
    assert taken["again"] == seen["path"]
    assert taken["moved"] is True
    assert apart(seen["overwritten"], taken["after"]) <= TOLERANCE
    assert apart(seen["overwritten"], seen["at_two"]) > APART


def test_gradients_that_no_step_had_taken_are_saved_with_the_state(seen: Any) -> None:
    pending = seen["pending"]
    assert apart(pending["other"], pending["own"]) <= TOLERANCE
    assert apart(pending["own"], seen["taken"]["after"]) > APART
    assert pending["bare"]["category"] == "user"


@pytest.mark.parametrize(("what", "words"), [("other_rank", "rank 8"), ("unknown_path", "two-not")])
def test_what_cannot_be_loaded_is_the_callers_fault(seen: Any, what: str, words: str) -> None:
    assert seen[what]["category"] == "user" or 400 <= (seen[what]["status"] or 0) < 500, seen[what]
    assert words in seen[what]["message"]


def test_dots_lead_nowhere(seen: Any) -> None:
    assert seen["dotted_path"] is not None
    assert seen["dotted_path"]["category"] == "user"
    assert apart(seen["narrow_after"], seen["fresh"]) <= TOLERANCE
