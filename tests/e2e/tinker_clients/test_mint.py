"""What `mint` has beyond Tinker: reverse KL and interpolation, and keys that begin with `sk-`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.tinker_clients.clients import CLIENTS, Desk
from tests.e2e.tinker_clients.numbers import TOLERANCE, apart, behind_first

pytestmark = pytest.mark.parametrize(
    "client", [it for it in CLIENTS if it.sdk == "mint"], ids=lambda it: it.name, scope="module", indirect=True
)


@pytest.fixture(scope="module")
def seen(desk: Desk) -> Any:
    """By a key of the kind that `mint` alone takes as it is."""
    return desk.run("extensions", key=desk.key("extensions", "--kind", "sk"))


def test_the_divergence_from_oneself_is_none_and_from_another_some(seen: Any) -> None:
    assert max(map(abs, seen["zero"]["losses"])) <= TOLERANCE
    assert min(seen["before"]["losses"]) > 0
    assert len(seen["before"]["losses"]) == len(seen["logprobs"]["base"])


def test_steps_bring_the_student_nearer_to_its_reference(seen: Any) -> None:
    rounds = seen["rounds"]
    assert rounds[0] == pytest.approx(sum(seen["before"]["losses"]), rel=1e-3)
    assert rounds[-1] < 0.8 * rounds[0]


def test_checkpoints_are_combined_linearly(seen: Any) -> None:
    logprobs = {name: behind_first(rows) for name, rows in seen["logprobs"].items() if name != "base"}
    assert apart(logprobs["same"], logprobs["reference"]) <= TOLERANCE
    assert apart(logprobs["none"], seen["logprobs"]["base"]) <= TOLERANCE
    assert apart(logprobs["half"], logprobs["reference"]) > TOLERANCE
    assert apart(logprobs["half"], logprobs["pupil"]) > TOLERANCE


def test_a_combination_says_what_it_is_of(seen: Any) -> None:
    assert seen["half"]["source_paths"] == [seen["reference"], seen["pupil"]]
    assert seen["half"]["coefficients"] == [0.5, 0.5]
    assert seen["half"]["checkpoint_type"] == "sampler"
    assert seen["half"]["has_rank_shards"] is False
    assert seen["same"]["path"].endswith("/sampler_weights/same")


def test_what_cannot_be_combined_or_compared_is_the_callers_fault(seen: Any) -> None:
    assert 400 <= seen["uneven"]["status"] < 500
    assert seen["unknown"]["category"] == "user" or seen["unknown"]["status"] == 404
    assert "teacher-not" in seen["unknown"]["message"]
    assert seen["after"]
