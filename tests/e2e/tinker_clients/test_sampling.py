"""Both public clients sample: the base, a named save, an ephemeral one; seeds, stops, prompts' logprobs; and the same
weights answer under the OpenAI API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.runs import Runs
from tests.e2e.tinker_clients.clients import Desk
from tests.e2e.tinker_clients.numbers import TOLERANCE, apart, behind_first, by_transformers, policy_of
from tests.tiny import TINY_NAME

EOS = 2


@pytest.fixture(scope="module")
def seen(desk: Desk) -> Any:
    return desk.run("sampling")


def test_the_base_is_sampled_as_it_is(seen: Any, base: Path) -> None:
    assert apart(behind_first(seen["base"]), by_transformers(base, seen["rows"])) <= TOLERANCE


def test_a_named_save_is_what_was_trained(seen: Any) -> None:
    assert seen["path"] == f"tinker://{seen['model_id']}/sampler_weights/named"
    assert seen["base_model"] == TINY_NAME
    assert apart(behind_first(seen["prompts"]["computed"]), seen["trained"]) <= TOLERANCE
    assert apart(seen["trained"], behind_first(seen["base"])) > 0.01


def test_an_ephemeral_save_is_what_was_trained_then_and_is_listed_nowhere(seen: Any) -> None:
    assert apart(behind_first(seen["ephemeral"]), seen["trained"]) <= TOLERANCE
    later = seen["later"]
    assert apart(behind_first(later["computed"]), later["trained"]) <= TOLERANCE
    assert apart(later["trained"], seen["trained"]) > 0.003
    assert seen["listed"] == ["sampler_weights/named"]


def test_prompts_have_the_logprobs_of_the_trainer_and_their_likeliest_tokens(seen: Any) -> None:
    for asked in seen["prompts"]["sampled"]:
        row, logprobs, topk = asked["row"], asked["logprobs"], asked["topk"]
        assert len(logprobs) == len(topk) == len(row)
        assert logprobs[0] is None
        assert topk[0] is None
        for token, logprob, top in zip(row[1:], logprobs[1:], topk[1:], strict=True):
            values = [value for _, value in top]
            assert len({token for token, _ in top}) == len(top) == 5
            assert values == sorted(values, reverse=True)
            assert logprob <= values[0] + TOLERANCE
            assert dict(map(tuple, top)).get(token, logprob) == pytest.approx(logprob, abs=TOLERANCE)
    sampled = [asked["logprobs"] for asked in seen["prompts"]["sampled"]]
    assert apart(behind_first(sampled), seen["trained"][: len(sampled)]) <= TOLERANCE


def test_a_seed_gives_the_same_sequences_and_each_its_own(seen: Any) -> None:
    one, again, two = seen["seeds"]["one"], seen["seeds"]["one_again"], seen["seeds"]["two"]
    tokens = [it["tokens"] for it in one]
    assert len(tokens) == 4
    assert len({tuple(it) for it in tokens}) == 4
    assert [it["tokens"] for it in again] == tokens
    assert [it["tokens"] for it in two] != tokens
    for it in one + two:
        assert len(it["logprobs"]) == len(it["tokens"]) == 12
        assert it["stop_reason"] == "length"
        assert all(value <= 0 for value in it["logprobs"])


def test_a_sequence_ends_by_itself_with_the_end_token(seen: Any) -> None:
    ended = seen["seeds"]["ended"]
    assert len(ended) == 4
    for it in ended:
        by_itself = it["tokens"][-1] == EOS
        assert EOS not in it["tokens"][:-1]
        assert it["stop_reason"] == ("stop" if by_itself else "length")
        assert by_itself or len(it["tokens"]) == 12
    assert any(it["stop_reason"] == "stop" for it in ended)


def test_a_stop_id_ends_the_sequence_and_stands_in_it_once(seen: Any) -> None:
    stops = seen["stops"]
    whole, by_id = stops["whole"]["tokens"], stops["by_id"]
    assert by_id["tokens"] == whole[: whole.index(stops["stop"]) + 1]
    assert by_id["stop_reason"] == "stop"


def test_a_stop_string_ends_the_sequence_with_the_token_that_completes_it(seen: Any) -> None:
    stops = seen["stops"]
    by_text = stops["by_text"]
    assert by_text["stop_reason"] == "stop"
    assert by_text["tokens"] == stops["whole"]["tokens"][: len(by_text["tokens"])]
    assert stops["text"] in stops["said"]
    assert stops["text"] not in stops["said_before"]


def test_no_stops_at_all_end_at_the_length(seen: Any) -> None:
    whole = seen["stops"]["whole"]
    assert len(whole["tokens"]) == 8
    assert whole["stop_reason"] == "length"


def test_what_cannot_be_sampled_is_the_callers_fault(seen: Any) -> None:
    for what, words in (
        ("taken", "sampler_weights/named"),
        ("training_path", "save_weights_for_sampler"),
        ("unknown", "named-not"),
        ("too_long", "1024"),
    ):
        refused = seen[what]
        assert refused is not None, f"{what} was accepted"
        assert refused["category"] == "user" or 400 <= (refused["status"] or 0) < 500, refused
        assert words in refused["message"], refused
    (after,) = seen["after"]
    assert after["tokens"] == seen["stops"]["whole"]["tokens"][: len(after["tokens"])]


def test_the_saved_weights_answer_under_the_openai_api_as_a_revision_of_the_models_policy(
    seen: Any, desk: Desk
) -> None:
    policy = policy_of(seen["model_id"])
    with Runs(desk.stack) as runs:
        (revision,) = runs.revisions(policy)
    body = {
        "model": f"{policy}@{revision['number']}",
        "prompt": seen["prompt"],
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 0,
    }
    headers = {"authorization": "Bearer tml-dev"}
    with httpx.Client(base_url=desk.url, headers=headers, trust_env=False, timeout=60) as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    (drawn,) = seen["after"]
    assert answer.headers["mint-revision"] == revision["revision"]
    found = choice["logprobs"]["token_logprobs"]
    # the API leaves the token out that ended the sequence
    assert len(drawn["tokens"]) - len(found) in (0, 1)
    assert apart([found], [drawn["logprobs"][: len(found)]]) <= TOLERANCE
