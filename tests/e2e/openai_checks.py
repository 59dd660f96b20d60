"""What people's OpenAI clients rely on, as checks that hold on any engine: each drives the `openai` package.

The engine computes in fp32, so that the same request gives the same tokens whatever else runs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.pagination import SyncCursorPage
from openai.types import CompletionUsage, Model

from tests.e2e.openai_surface import QUESTION, TEXT, Surface

GONE_S = 60.0
NEVER = -9999.0


def an_answer_says_what_ran(surface: Surface) -> None:
    """`model` echoes the reference asked for; the headers have the revision and the adapter's digest."""
    create = surface.client.chat.completions.with_raw_response.create
    for asked in (surface.policy, f"{surface.policy}:live", surface.revision):
        raw = create(model=asked, messages=QUESTION, max_tokens=4)
        assert raw.parse().model == asked
        assert raw.headers["mint-revision"] == surface.revision
        assert raw.headers["mint-adapter-sha256"] == surface.adapter_sha256
        assert (raw.parse().system_fingerprint or "").startswith(surface.adapter_sha256[:12])
    plain = create(model=surface.base, messages=QUESTION, max_tokens=4)
    assert plain.parse().model == surface.base
    assert "mint-revision" not in plain.headers
    assert "mint-adapter-sha256" not in plain.headers


def a_chat_is_answered(surface: Surface) -> None:
    answer = surface.chat()
    assert answer.object == "chat.completion"
    assert [choice.index for choice in answer.choices] == [0]
    assert answer.choices[0].message.role == "assistant"
    prompt = surface.post("/tokenize", model=surface.policy, messages=QUESTION)
    usage: CompletionUsage = answer.usage
    assert usage.prompt_tokens == prompt["count"]
    assert 1 <= usage.completion_tokens <= 8
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def a_stream_is_the_answer_in_pieces_with_its_usage(surface: Surface) -> None:
    whole = surface.chat(logprobs=True, top_logprobs=2)
    chunks = list(surface.chat(logprobs=True, top_logprobs=2, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert deltas[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    tokens = [entry.token for choice in deltas if choice.logprobs for entry in choice.logprobs.content or []]
    assert tokens == [entry.token for entry in whole.choices[0].logprobs.content]
    reasons = [choice.finish_reason for choice in deltas if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def a_completion_streams_too(surface: Surface) -> None:
    whole = surface.complete(prompt=[TEXT, "1, 2, 3,"])
    chunks = list(surface.complete(prompt=[TEXT, "1, 2, 3,"], stream=True, stream_options={"include_usage": True}))
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert chunks[-1].usage == whole.usage


def a_seed_gives_the_same_choices_again(surface: Surface) -> None:
    def texts(n: int, seed: int) -> list[str]:
        answer = surface.chat(n=n, seed=seed, temperature=1.0)
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.message.content for choice in answer.choices]

    three = texts(3, 7)
    assert texts(3, 7) == three
    assert texts(2, 7) == three[:2]
    assert texts(3, 8) != three
    assert len(set(three)) > 1


def a_stop_string_ends_the_answer_before_it(surface: Surface) -> None:
    whole = surface.complete(max_tokens=16).choices[0].text
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]
    cut = surface.complete(max_tokens=16, stop=[stop, "\0never"]).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


def chat_logprobs_are_of_the_tokens(surface: Surface) -> None:
    choice = surface.chat(logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0
    said = [entry for entry in content if not entry.token.startswith("<|")]
    if all(entry.bytes is not None for entry in said):
        assert bytes(byte for entry in said for byte in entry.bytes).decode() == choice.message.content


def what_filters_rule_out_is_minus_9999(surface: Surface) -> None:
    """Minus infinity is no JSON. Engines list what was ruled out or leave it out."""
    chat = surface.chat(temperature=1, logprobs=True, top_logprobs=3, extra_body={"top_k": 1}).choices[0]
    for entry in chat.logprobs.content:
        assert entry.logprob == pytest.approx(0, abs=1e-5)
        assert {top.logprob for top in entry.top_logprobs[1:]} <= {NEVER}
    plain = surface.complete(temperature=1, logprobs=3, extra_body={"top_k": 1}).choices[0].logprobs
    assert all(set(sorted(top.values())[:-1]) <= {NEVER} for top in plain.top_logprobs)


def every_narrow_filter_is_greedy(surface: Surface) -> None:
    greedy = surface.complete().choices[0].text
    assert surface.complete(temperature=1, seed=1, extra_body={"top_k": 1}).choices[0].text == greedy
    assert surface.complete(temperature=1, seed=1, extra_body={"min_p": 1.0}).choices[0].text == greedy
    assert surface.complete(temperature=1, seed=1, top_p=1e-6).choices[0].text == greedy


def logit_bias_forces_and_forbids(surface: Surface) -> None:
    forced = surface.ids(" seven")[0]
    found = surface.complete(logit_bias={str(forced): 100}, max_tokens=3, logprobs=0).choices[0]
    assert found.text == " seven seven seven"
    first = surface.complete(max_tokens=1, logprobs=0).choices[0].logprobs.tokens[0]
    other = surface.complete(max_tokens=1, logprobs=0, logit_bias={str(surface.ids(first)[0]): -100})
    assert other.choices[0].logprobs.tokens[0] != first


def penalties_make_repetition_rarer(surface: Surface) -> None:
    """A token that a bias keeps just ahead falls behind once it was said often enough."""
    said = surface.ids(" seven")[0]
    ask = {"prompt": "seven seven seven seven", "logit_bias": {str(said): 30}, "max_tokens": 24, "logprobs": 0}

    def most(**penalties: float) -> int:
        tokens = surface.complete(**ask, **penalties).choices[0].logprobs.tokens
        return max(Counter(tokens).values())

    assert most(frequency_penalty=2.0) < most()
    assert most(frequency_penalty=-2.0) == most()
    assert most(presence_penalty=2.0) <= most()


def the_length_is_bounded_under_both_names(surface: Surface) -> None:
    bias = {str(surface.ids(" seven")[0]): 100}
    for name in ("max_tokens", "max_completion_tokens"):
        answer = surface.client.chat.completions.create(
            **{"model": surface.policy, "messages": QUESTION, "logit_bias": bias, name: 5}  # type: ignore[call-overload]
        )
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 5


def every_shape_of_prompt_is_the_same_prompt(surface: Surface) -> None:
    ids = surface.ids(TEXT)
    text = surface.complete().choices[0].text
    assert surface.complete(prompt=ids).choices[0].text == text
    for many in ([TEXT, TEXT], [ids, ids]):
        answer = surface.complete(prompt=many, n=2)
        assert [choice.text for choice in answer.choices] == [text] * 4
        assert answer.usage.prompt_tokens == 2 * len(ids)


def echo_has_every_tokens_logprob_and_place(surface: Surface) -> None:
    ids = surface.ids(TEXT)
    choice = surface.complete(prompt=ids, echo=True, logprobs=1, max_tokens=2).choices[0]
    found = choice.logprobs
    assert choice.text.startswith(TEXT)
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(ids) + 2
    for token, offset in zip(found.tokens[: len(ids)], found.text_offset, strict=False):
        assert choice.text[offset : offset + len(token)] == token
    assert found.text_offset[len(ids)] == len(TEXT)
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    assert all(
        value in top.values() for value, top in zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True)
    )


def scoring_a_prompt_gives_what_sampling_it_gave(surface: Surface) -> None:
    """`max_tokens` 0 with echo: a token's logprob in a prompt is its logprob as the next token of what precedes."""
    ids, expected = surface.ids(TEXT), []
    start = len(ids)
    for _ in range(4):
        top = surface.complete(prompt=ids, max_tokens=1, logprobs=5).choices[0].logprobs.top_logprobs[0]
        token, logprob = next((t, value) for t, value in top.items() if "\ufffd" not in t and len(surface.ids(t)) == 1)
        ids += surface.ids(token)
        expected.append(logprob)
    scored = surface.complete(prompt=ids, echo=True, logprobs=1, max_tokens=0)
    choice = scored.choices[0]
    assert (choice.finish_reason, scored.usage.completion_tokens) == ("length", 0)
    assert len(choice.logprobs.tokens) == len(ids)
    assert choice.logprobs.token_logprobs[start:] == pytest.approx(expected, abs=1e-3)


def models_are_listed_by_pages_and_found_by_reference(surface: Surface) -> None:
    listed = [model.id for model in surface.client.models.list()]
    assert listed[0] == surface.base
    assert surface.policy in listed
    pages = surface.client.get_api_list(
        "/models", page=SyncCursorPage[Model], model=Model, options={"params": {"limit": 1}}
    )
    assert [model.id for model in pages] == listed
    found: Any = surface.client.models.retrieve(surface.policy)
    assert (found.id, found.owned_by) == (surface.policy, surface.policy.partition("/")[0])
    assert (found.revision, found.adapter_sha256) == (surface.revision, surface.adapter_sha256)
    assert surface.client.models.retrieve(surface.base).owned_by == "base"


def tokens_and_text_are_inverse(surface: Surface) -> None:
    ids = surface.ids("Hällo, wörld <|im_end|>")
    for prefix in ("", "/v1"):
        assert surface.post(f"{prefix}/detokenize", model=surface.policy, tokens=ids) == {
            "prompt": "Hällo, wörld <|im_end|>"
        }


def errors_are_the_clients_own_exceptions(surface: Surface) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        surface.chat(temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        surface.complete(prompt=[5] * 100_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        surface.chat(model=f"{surface.policy}s")
    assert unknown.value.code == "model_not_found"
    assert surface.policy in str(unknown.value.body)
    stranger = surface.client.with_options(api_key="sk-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def hanging_up_ends_the_generation(surface: Surface) -> None:
    """Of a streamed answer, and of a whole one that its client no longer waits for."""
    _until_idle(surface)
    bias = {str(surface.ids(" seven")[0]): 100}
    room = surface.post("/tokenize", model=surface.policy, prompt=TEXT)
    ask = {"logit_bias": bias, "max_tokens": min(room["max_model_len"] - room["count"], 1500), "n": 4}
    stream = surface.complete(**ask, stream=True)
    next(iter(stream))
    assert surface.in_flight() > 0
    stream.close()
    _until_idle(surface)
    with pytest.raises(openai.APITimeoutError):
        surface.complete(**ask, timeout=0.5)
    _until_idle(surface)


def _until_idle(surface: Surface) -> None:
    deadline = time.monotonic() + GONE_S
    while surface.in_flight():
        assert time.monotonic() < deadline, "a replica still has requests in flight"
        time.sleep(0.1)


CHECKS: list[Callable[[Surface], None]] = [
    an_answer_says_what_ran,
    a_chat_is_answered,
    a_stream_is_the_answer_in_pieces_with_its_usage,
    a_completion_streams_too,
    a_seed_gives_the_same_choices_again,
    a_stop_string_ends_the_answer_before_it,
    chat_logprobs_are_of_the_tokens,
    what_filters_rule_out_is_minus_9999,
    every_narrow_filter_is_greedy,
    logit_bias_forces_and_forbids,
    penalties_make_repetition_rarer,
    the_length_is_bounded_under_both_names,
    every_shape_of_prompt_is_the_same_prompt,
    echo_has_every_tokens_logprob_and_place,
    scoring_a_prompt_gives_what_sampling_it_gave,
    models_are_listed_by_pages_and_found_by_reference,
    tokens_and_text_are_inverse,
    errors_are_the_clients_own_exceptions,
    hanging_up_ends_the_generation,
]
