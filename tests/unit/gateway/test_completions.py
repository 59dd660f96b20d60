"""/v1/completions, asked with the openai package."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from shared.engine.port import SampleChunk, SampleRequest
from shared.errors import Busy
from tests.unit.gateway.kit import BASE, CODEC, Kit


async def test_text_completion_with_the_default_length(kit: Kit) -> None:
    raw = await kit.openai().completions.with_raw_response.create(model="acme/adder", prompt="1+1=")
    answer = raw.parse()
    assert answer.choices[0].text == "from acme/adder@"
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == "acme/adder"
    assert raw.headers["mint-revision"] == "acme/adder@2"
    assert kit.sampler.requests[0].prompt == tuple(CODEC.encode("1+1="))
    assert kit.sampler.requests[0].settings.max_tokens == 16


@pytest.mark.parametrize(
    "prompt", ["ab", CODEC.encode("ab"), ["ab", "cd"], [CODEC.encode("ab"), CODEC.encode("cd")]], ids=repr
)
async def test_every_shape_of_prompt(kit: Kit, prompt: Any) -> None:
    kit.sampler.reply = lambda request: CODEC.decode(request.prompt).upper()
    answer = await kit.openai().completions.create(model=BASE, prompt=prompt, n=2, seed=3)
    many = isinstance(prompt[0], list) or prompt == ["ab", "cd"]
    assert [choice.text for choice in answer.choices] == (["AB", "AB", "CD", "CD"] if many else ["AB", "AB"])
    assert [choice.index for choice in answer.choices] == list(range(4 if many else 2))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == (4 if many else 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ""}, "empty prompt"),
        ({"prompt": []}, "not empty"),
        ({"prompt": [5, "a"]}, "list of token ids"),
        ({"prompt": [999]}, "outside 0 to 257"),
        ({"prompt": "x", "max_tokens": 0}, "unless echo"),
        ({"prompt": "x" * 510}, "510 tokens and 16 more"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": ["x"] * 9, "n": 128}, "1152 choices"),
    ],
)
async def test_bad_prompts_are_refused_in_words(kit: Kit, fields: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        await kit.openai().completions.create(model=BASE, **fields)


async def test_logprobs_in_the_completions_shape(kit: Kit) -> None:
    kit.sampler.reply = lambda _: "hé"
    answer = await kit.openai().completions.create(model=BASE, prompt="x", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    h = CODEC.encode("h")[0]
    assert logprobs.tokens == ["h", "\ufffd", "\ufffd", "<|im_end|>"]
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] == pytest.approx(-h / 100)
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"h": pytest.approx(-h / 100), CODEC.token_text(h + 1): -0.5}


async def test_a_filtered_alternative_is_minus_9999(kit: Kit) -> None:
    answer = await kit.openai().completions.create(model=BASE, prompt="x", logprobs=3, max_tokens=1)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.top_logprobs is not None
    assert -9999.0 in answer.choices[0].logprobs.top_logprobs[0].values()


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_and_its_logprobs_first(kit: Kit, stream: bool) -> None:
    kit.sampler.reply = lambda _: "yz"
    fields: Any = {"model": BASE, "prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1}
    if stream:
        found = [c.choices[0] async for c in await kit.openai().completions.create(**fields, stream=True)]
    else:
        found = list((await kit.openai().completions.create(**fields)).choices)
    assert "".join(choice.text for choice in found) == "abcy"
    parts = [choice.logprobs for choice in found if choice.logprobs is not None]
    assert [token for part in parts for token in part.tokens or []] == ["a", "b", "c", "y"]
    assert [offset for part in parts for offset in part.text_offset or []] == [0, 1, 2, 3]
    values = [value for part in parts for value in part.token_logprobs or []]
    assert values[0] is None
    assert all(value is not None for value in values[1:])
    tops = [top for part in parts for top in part.top_logprobs or []]
    assert tops[0] is None
    assert kit.sampler.requests[0].settings.prompt_logprobs == 1


async def test_echo_of_token_ids_alone_scores_a_prompt(kit: Kit) -> None:
    prompt = CODEC.encode("abc")
    answer = await kit.openai().completions.create(model=BASE, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("abc", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert kit.sampler.requests[0].settings.max_tokens == 1
    assert kit.sampler.open == []


async def test_a_stop_string_in_the_echoed_prompt_stops_nothing(kit: Kit) -> None:
    kit.sampler.reply = lambda _: "y;z"
    answer = await kit.openai().completions.create(model=BASE, prompt="a;b", echo=True, stop=";")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("a;by", "stop")


async def test_streaming_with_usage(kit: Kit) -> None:
    kit.sampler.reply = lambda request: CODEC.decode(request.prompt).upper()
    stream = await kit.openai().completions.create(
        model=BASE, prompt=["ab", "cd"], stream=True, stream_options={"include_usage": True}
    )
    texts, chunks = {0: "", 1: ""}, [chunk async for chunk in stream]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "AB", 1: "CD"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 4
    assert chunks[-1].usage.completion_tokens == 6


async def test_top_k_zero_is_off(kit: Kit) -> None:
    await kit.openai().completions.create(model=BASE, prompt="x", extra_body={"top_k": 0})
    assert kit.sampler.requests[0].settings.top_k == -1


async def test_minus_infinity_is_minus_9999_in_prompts_and_answers_alike(kit: Kit) -> None:
    never = float("-inf")

    async def chunks(request: SampleRequest) -> AsyncIterator[SampleChunk]:
        yield SampleChunk(
            index=0,
            token_ids=(7,),
            logprobs=(never,),
            top_logprobs=({7: never, 8: -0.5},),
            finish_reason="length",
            prompt_logprobs=(None, never),
            prompt_top_logprobs=(None, {6: never, 9: -0.25}),
        )

    kit.sampler._chunks = chunks  # type: ignore[method-assign]
    ask = {"model": BASE, "prompt": [5, 6], "echo": True, "logprobs": 1, "max_tokens": 1}
    async with kit.http() as http:
        answer = await http.post("/v1/completions", json=ask)
    found = json.loads(answer.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]
    name = CODEC.token_text
    assert found["token_logprobs"] == [None, -9999.0, -9999.0]
    assert found["top_logprobs"] == [None, {name(6): -9999.0, name(9): -0.25}, {name(7): -9999.0, name(8): -0.5}]


async def test_a_streamed_prompt_alone_has_its_usage_and_an_end(kit: Kit) -> None:
    stream = await kit.openai().completions.create(
        model=BASE,
        prompt=[CODEC.encode("abc"), CODEC.encode("de")],
        echo=True,
        logprobs=1,
        max_tokens=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    texts, reasons = {0: "", 1: ""}, {}
    for chunk in chunks[:-1]:
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        if choice.finish_reason is not None:
            reasons[choice.index] = choice.finish_reason
    assert texts == {0: "abc", 1: "de"}
    assert reasons == {0: "length", 1: "length"}
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (5, 0)


async def test_what_lm_eval_asks_for(kit: Kit) -> None:
    """A list of token-id lists, echo, logprobs 1, one token; it reads `[ctxlen:-1]` of each choice."""
    context, choices = CODEC.encode("Q: 1+1?\nA:"), [CODEC.encode(" 2"), CODEC.encode(" 11")]
    answer = await kit.openai().completions.create(
        model=BASE,
        prompt=[context + choice for choice in choices],
        temperature=0,
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    for choice, tokens in zip(answer.choices, choices, strict=True):
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        read = slice(len(context), -1)
        assert logprobs.token_logprobs[read] == pytest.approx([-token / 100 for token in tokens])
        for token, logprob, top in zip(tokens, logprobs.token_logprobs[read], logprobs.top_logprobs[read], strict=True):
            assert top[CODEC.token_text(token)] == logprob


LIMITED = Busy("acme may send 2 requests per second; slow down", "rate_limited", 429, 0.0)


def _turn_away(kit: Kit, *times: int, error: Busy = LIMITED) -> None:
    """Each choice as often as said, as a rate would."""
    left = Counter(dict(enumerate(times)))

    def refuse(request: SampleRequest) -> Busy | None:
        choice = int(request.request_id.rpartition("-")[2])
        left[choice] -= 1
        return error if left[choice] >= 0 else None

    kit.sampler.refuse = refuse


@pytest.mark.parametrize("refusals", [(0, 1, 2), (3, 0, 1)], ids=str)
async def test_more_choices_than_a_limit_lets_in_at_once_all_come(kit: Kit, refusals: tuple[int, ...]) -> None:
    _turn_away(kit, *refusals)
    answer = await kit.openai().completions.create(model=BASE, prompt="x", n=3)
    assert [choice.text for choice in answer.choices] == ["from base"] * 3
    assert len(kit.sampler.requests) == 3 + sum(refusals)


async def test_a_request_of_which_every_choice_is_turned_away_is_told_so(kit: Kit) -> None:
    _turn_away(kit, 1, 1, 1, error=Busy("2 requests per second", "rate_limited", 429, 60.0))
    with pytest.raises(openai.RateLimitError, match="2 requests per second"):
        await kit.openai().completions.create(model=BASE, prompt="x", n=3)
    assert len(kit.sampler.requests) == 3


@pytest.mark.parametrize(
    "error", [Busy("full", "queue_full", 503, 0.0), Busy("slow down", "rate_limited", 429, 1e6)], ids=["full", "long"]
)
async def test_a_choice_waits_for_limits_alone_and_no_longer_than_the_request(kit: Kit, error: Busy) -> None:
    _turn_away(kit, 0, 1, error=error)
    with pytest.raises(openai.APIStatusError) as raised:
        await kit.openai().completions.create(model=BASE, prompt="x", n=2)
    assert raised.value.status_code == error.status
    assert len(kit.sampler.requests) == 2


async def test_who_asks_again_has_what_is_left_of_the_wait(kit: Kit) -> None:
    _turn_away(kit, 0, 1)
    await kit.openai().completions.create(model=BASE, prompt="x", n=2, extra_headers={"mint-wait-s": "500"})
    first, _, again = (request.wait_s for request in kit.sampler.requests)
    assert first == 500.0
    assert again is not None
    assert 0 < again < 500.0
