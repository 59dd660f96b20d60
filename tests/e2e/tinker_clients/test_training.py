"""Both public clients train: forward, many data, steps asked for early, custom losses; and what is refused, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tinker_clients.clients import Desk
from tests.e2e.tinker_clients.numbers import TOLERANCE, apart, by_transformers
from tests.tiny import TINY_NAME

MANY = 2500


@pytest.fixture(scope="module")
def seen(desk: Desk) -> Any:
    return desk.run("training")


def test_a_client_learns_what_it_created(seen: Any) -> None:
    assert seen["info"] == {"model": TINY_NAME, "rank": 8, "lora": True, "model_id": seen["model_id"]}
    assert ":train:" in seen["model_id"]
    assert seen["text"] == "a cat sat"


def test_forward_of_a_fresh_model_equals_transformers(seen: Any, base: Path) -> None:
    expected = by_transformers(base, seen["rows"])
    assert apart(seen["first"]["logprobs"], expected) <= TOLERANCE
    summed = -sum(map(sum, expected))
    assert seen["first"]["metrics"]["loss:sum"] == pytest.approx(summed, rel=1e-4)


def test_every_loss_is_its_formula_where_all_ratios_are_one(seen: Any) -> None:
    found, losses = seen["losses"], seen["losses"]["found"]
    assert losses["importance_sampling"] == pytest.approx(-found["advantages"], abs=1e-2)
    assert losses["ppo"] == pytest.approx(-found["advantages"], abs=1e-2)
    assert losses["cispo"] == pytest.approx(-found["weighed"], rel=1e-3, abs=1e-2)
    assert losses["dro"] == pytest.approx(-found["weighed"], rel=1e-3, abs=1e-2)


def test_many_data_come_back_in_order_and_their_losses_are_one_sum(seen: Any) -> None:
    many, first = seen["many"], seen["first"]["logprobs"]
    assert len(many["logprobs"]) == MANY
    assert apart(many["logprobs"], [first[n % len(first)] for n in range(MANY)]) <= TOLERANCE
    summed = -sum(sum(first[n % len(first)]) for n in range(MANY))
    assert many["metrics"]["loss:sum"] == pytest.approx(summed, rel=1e-4)


def test_a_step_that_was_asked_for_early_takes_all_of_the_gradients(seen: Any) -> None:
    before, after = -sum(map(sum, seen["first"]["logprobs"])), -sum(map(sum, seen["after_many"]))
    assert after < before


def test_steps_lower_the_loss(seen: Any) -> None:
    losses = seen["steps"]
    assert losses[0] == pytest.approx(-sum(map(sum, seen["after_many"])), rel=1e-4)
    assert losses[-1] < losses[0]


def test_a_custom_loss_trains_as_the_cross_entropy_that_it_equals(seen: Any) -> None:
    custom = seen["custom"]
    assert custom["metrics"]["loss:sum"] == pytest.approx(custom["loss"], rel=1e-4)
    assert custom["metrics"]["rows:sum"] == len(seen["rows"])
    assert apart(custom["after_custom"], custom["after_named"]) <= TOLERANCE
    assert apart(custom["after_custom"], seen["first"]["logprobs"]) > 0.01


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no gradient", "forward_backward"),
        ("no beta", "beta"),
        ("long targets", "targets"),
        ("nan weights", "weights"),
        ("unknown token", "49152"),
        ("unembed alone", "train_unembed"),
        ("large rank", "4096"),
        ("unknown base", "nobody/nothing"),
    ],
)
def test_what_is_refused_is_the_callers_fault_and_names_it(seen: Any, what: str, words: str) -> None:
    refused = seen["refusals"][what]
    assert refused is not None, f"{what} was accepted"
    assert refused["category"] == "user" or 400 <= (refused["status"] or 0) < 500, refused
    assert words in refused["message"], refused


def test_a_loss_of_the_server_side_alone_is_refused_by_name(seen: Any, desk: Desk) -> None:
    refused = seen["refusals"]["unknown loss"]
    if desk.client.sdk == "mint":
        assert refused is None  # its own types know no such loss
    else:
        assert refused["category"] == "user"
        assert "stable_reinforce" in refused["message"]


def test_refused_operations_change_nothing(seen: Any) -> None:
    assert apart(seen["refusals"]["after"], seen["last"]) == 0
