"""What a request may not combine, in words that say what would be right."""

from __future__ import annotations

from typing import Any

import pytest
from mint_schemas import TrainRequested
from pydantic import ValidationError

TASK = {"kind": "arithmetic"}
SCORED = {"evaluation": {"task": TASK}}


def request(method: dict[str, Any] | None = None, **fields: Any) -> TrainRequested:
    return TrainRequested.model_validate(
        {
            "policy": "acme/a",
            "base": "b",
            "method": {"kind": "grpo", "task": TASK, "steps": 8, **(method or {})},
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("method", "fields", "words"),
    [
        ({"epochs": 3}, {}, "steps is 8; with 3 epochs of 1 minibatches a record gets 3 steps"),
        ({"minibatches": 8, "prompts_per_step": 4}, {}, "8 minibatches of 4 prompts"),
        (
            {"kl": {"coefficient": 0.1, "estimator": "k1", "times_ratio": True}},
            {},
            "times_ratio goes with k3, not with k1",
        ),
        ({"correction": {"kind": "icepop", "low": 6}}, {}, "low 6.0 is above high 5.0"),
        ({}, {"eval_every": 2}, "eval_every needs an evaluation"),
        ({}, {"promote": "best", **SCORED}, "promote: best needs eval_every"),
        ({}, {"stop_when": {}}, "name at least one of target_score, no_progress_steps, max_tokens"),
        ({}, {"stop_when": {"target_score": 0.5}, **SCORED}, "stop_when on scores needs eval_every"),
    ],
)
def test_what_does_not_go_together_is_refused_in_words(
    method: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        request(method, **fields)


def test_what_goes_together_is_taken() -> None:
    asked = request(
        {"epochs": 2, "minibatches": 2, "kl": {"coefficient": 0.1, "times_ratio": True}, "staleness": 1},
        eval_every=4,
        promote="best",
        stop_when={"target_score": 0.9, "no_progress_steps": 8, "max_tokens": 10_000},
        **SCORED,
    )
    assert asked.method.steps_per_record == 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("method", "where", "words"),
    [
        ({"group_size": "8"}, "group_size", "Input should be a valid integer"),
        ({"group_size": True}, "group_size", "Input should be a valid integer"),
        ({"group_size": 8.5}, "group_size", "Input should be a valid integer"),
        ({"temperature": "0.5"}, "temperature", "Input should be a valid number"),
        ({"temperature": True}, "temperature", "Input should be a valid number"),
        ({"mask_overlong": 0}, "mask_overlong", "Input should be a valid boolean"),
        ({"mask_overlong": "no"}, "mask_overlong", "Input should be a valid boolean"),
    ],
)
def test_a_value_of_another_json_type_is_refused(method: dict[str, Any], where: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words) as refused:
        request(method)
    assert [error["loc"] for error in refused.value.errors()] == [("method", "grpo", where)]


def test_whole_numbers_may_be_written_with_a_point_and_numbers_without() -> None:
    method = request({"steps": 8.0, "group_size": 1e1, "temperature": 1}).method
    assert (method.steps, method.group_size, method.temperature) == (8, 10, 1.0)  # type: ignore[union-attr]


def test_an_empty_reward_is_the_exact_match_that_its_schema_gives() -> None:
    task = request({"task": {**TASK, "reward": {}}}).method.task  # type: ignore[union-attr]
    assert task.reward.kind == "exact_match"
