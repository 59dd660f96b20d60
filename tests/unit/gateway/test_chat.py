"""/v1/chat/completions, asked with the openai package."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from shared.engine.port import SampleRequest
from shared.errors import Refused, Retryable
from shared.sampling.port import BACKGROUND, INTERACTIVE, Served
from tests.unit.gateway.kit import BASE, BASE_SHA256, CODEC, Kit

ASK: Any = [{"role": "user", "content": "What is 1+1?"}]


async def test_a_policy_answers_under_its_own_name_and_says_what_ran(kit: Kit) -> None:
    """vllm#11090: `model` is the policy reference, the revision is in a header."""
    raw = await kit.openai().chat.completions.with_raw_response.create(model="acme/adder", messages=ASK)
    answer = raw.parse()
    assert answer.model == "acme/adder"
    assert answer.choices[0].message.content == "from acme/adder@2"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.system_fingerprint == "222222222222/vllm"
    assert raw.headers["mint-revision"] == "acme/adder@2"
    assert raw.headers["mint-adapter-sha256"] == "2" * 64
    assert raw.headers["mint-base"] == BASE
    assert "mint-resolution" not in raw.headers


@pytest.mark.parametrize(
    ("asked", "revision"),
    [("acme/adder", "acme/adder@2"), ("acme/adder:live", "acme/adder@2"), ("acme/adder@3", "acme/adder@3")],
)
async def test_every_way_to_name_a_policy(kit: Kit, asked: str, revision: str) -> None:
    answer = await kit.openai().chat.completions.create(model=asked, messages=ASK)
    assert answer.model == asked
    assert kit.sampler.requests[0].revision == revision


async def test_the_base_answers_under_its_exact_name(kit: Kit) -> None:
    raw = await kit.openai().chat.completions.with_raw_response.create(model=BASE, messages=ASK)
    answer = raw.parse()
    assert (answer.model, answer.choices[0].message.content) == (BASE, "from base")
    assert answer.system_fingerprint == "bbbbbbbbbbbb/vllm"
    assert "mint-revision" not in raw.headers
    assert kit.sampler.requests[0].revision is None


async def test_the_prompt_is_templated_and_tokenised_here(kit: Kit) -> None:
    system: Any = [
        {"role": "developer", "content": "Add."},
        {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]},
    ]
    answer = await kit.openai().chat.completions.create(model=BASE, messages=system)
    prompt = kit.sampler.requests[0].prompt
    text = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    assert CODEC.decode(prompt, skip_special=False) == text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len("from base") + 1
    assert answer.usage.total_tokens == len(prompt) + len("from base") + 1


async def test_sampling_fields_reach_the_engine(kit: Kit) -> None:
    await kit.openai().chat.completions.create(
        model=BASE,
        messages=ASK,
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={"65": -100},
        extra_body={"top_k": 5, "min_p": 0.05},
    )
    settings = kit.sampler.requests[0].settings
    assert (settings.max_tokens, settings.temperature, settings.top_p) == (7, 0.5, 0.9)
    assert (settings.top_k, settings.min_p) == (5, 0.05)
    assert (settings.presence_penalty, settings.frequency_penalty) == (0.1, -0.2)
    assert settings.logit_bias == {65: -100.0}
    assert settings.stop_token_ids == CODEC.eos_ids
    assert settings.logprobs is None


async def test_choices_have_their_own_seeds_whatever_n_is(kit: Kit) -> None:
    client = kit.openai()
    await client.chat.completions.create(model=BASE, messages=ASK, n=3, seed=7)
    three = [request.seed for request in kit.sampler.requests]
    kit.sampler.requests.clear()
    await client.chat.completions.create(model=BASE, messages=ASK, n=1, seed=7)
    await client.chat.completions.create(model=BASE, messages=ASK, n=1, seed=8)
    one, other = [request.seed for request in kit.sampler.requests]
    assert len(set(three)) == 3
    assert one == three[0]
    assert other not in three


async def test_n_choices_come_each_with_its_own_text(kit: Kit) -> None:
    kit.sampler.reply = lambda request: f"choice {request.request_id.rpartition('-')[2]}"
    answer = await kit.openai().chat.completions.create(model=BASE, messages=ASK, n=3)
    assert [(c.index, c.message.content) for c in answer.choices] == [(i, f"choice {i}") for i in range(3)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * (len("choice 0") + 1)


async def test_max_completion_tokens_cuts_with_length(kit: Kit) -> None:
    answer = await kit.openai().chat.completions.create(model=BASE, messages=ASK, max_completion_tokens=4)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("from", "length")


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 100])
async def test_a_stop_string_is_found_across_chunks_and_ends_the_generation(kit: Kit, chunk_tokens: int) -> None:
    kit.sampler.reply = lambda _: "The answer is 2. Next question:" + " more" * 30
    kit.sampler.chunk_tokens = chunk_tokens
    answer = await kit.openai().chat.completions.create(
        model=BASE, messages=ASK, stop=["question", ". Ne"], max_tokens=200
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("The answer is 2", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("The answer is 2. Ne")
    (sent,) = kit.sampler.sent.values()
    assert sent <= len("The answer is 2. Ne") + chunk_tokens
    assert kit.sampler.open == []


async def test_streaming_gives_the_same_text_role_first_and_usage_last(kit: Kit) -> None:
    kit.sampler.reply = lambda _: "grüße 🙂 ok"
    kit.sampler.chunk_tokens = 1
    stream = await kit.openai().chat.completions.create(
        model="acme/adder", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "grüße 🙂 ok"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert all("\ufffd" not in (c.choices[0].delta.content or "") for c in chunks if c.choices)
    assert {c.model for c in chunks} == {"acme/adder"}
    assert {c.system_fingerprint for c in chunks} == {"222222222222/vllm"}
    assert len({c.id for c in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len("grüße 🙂 ok".encode()) + 1
    assert all(c.usage is None for c in chunks[:-1])


async def test_streaming_without_usage_has_none_and_carries_the_proof_headers(kit: Kit) -> None:
    raw = await kit.openai().chat.completions.with_raw_response.create(model="acme/adder", messages=ASK, stream=True)
    assert raw.headers["mint-revision"] == "acme/adder@2"
    chunks = [chunk async for chunk in raw.parse()]
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


async def test_streamed_choices_keep_their_index(kit: Kit) -> None:
    kit.sampler.reply = lambda request: f"choice {request.request_id.rpartition('-')[2]}"
    stream = await kit.openai().chat.completions.create(model=BASE, messages=ASK, n=2, stream=True)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "choice 0", 1: "choice 1"}


async def test_logprobs_run_beside_the_tokens_without_infinity(kit: Kit) -> None:
    kit.sampler.reply = lambda _: "ab"
    answer = await kit.openai().chat.completions.create(model=BASE, messages=ASK, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    a = CODEC.encode("a")[0]
    assert [entry.token for entry in logprobs.content] == ["a", "b", "<|im_end|>"]
    assert logprobs.content[0].logprob == pytest.approx(-a / 100)
    assert logprobs.content[0].bytes == [97]
    assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-0.5, pytest.approx(-a / 100), -9999.0]
    assert kit.sampler.requests[0].settings.logprobs == 3


async def test_streamed_logprobs_are_those_of_the_whole_answer(kit: Kit) -> None:
    kit.sampler.reply = lambda _: "né? stop here"
    fields: Any = {"model": BASE, "messages": ASK, "logprobs": True, "top_logprobs": 1, "stop": " here"}
    whole = await kit.openai().chat.completions.create(**fields)
    kit.sampler.chunk_tokens = 1
    stream = await kit.openai().chat.completions.create(**fields, stream=True)
    streamed: list[Any] = []
    async for chunk in stream:
        found = chunk.choices[0].logprobs
        streamed += found.content if found is not None else []
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content is not None
    assert [entry.model_dump() for entry in whole.choices[0].logprobs.content] == [e.model_dump() for e in streamed]
    assert "".join(entry.token for entry in streamed[3:]) == "? stop"
    assert [entry.bytes for entry in streamed[1:3]] == [None, None], "parts of é"


async def test_greedy_without_alternatives_asks_for_the_sampled_logprob_only(kit: Kit) -> None:
    answer = await kit.openai().chat.completions.create(model=BASE, messages=ASK, logprobs=True, temperature=0)
    assert kit.sampler.requests[0].settings.logprobs == 0
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert all(entry.top_logprobs == [] for entry in answer.choices[0].logprobs.content)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "outside 0 to 257"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages", "'assistant'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "content is required"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"extra_body": {"priority": 11}}, "priority", "less than or equal to 10"),
        ({"extra_body": {"priority": -1}}, "priority", "greater than or equal to 0"),
        ({"extra_headers": {"mint-wait-s": "0"}}, "mint-wait-s", "above 0, at most 3600"),
        ({"extra_headers": {"mint-wait-s": "3601"}}, "mint-wait-s", "above 0, at most 3600"),
        ({"extra_headers": {"mint-wait-s": "nan"}}, "mint-wait-s", "above 0, at most 3600"),
        ({"extra_headers": {"mint-wait-s": "soon"}}, "mint-wait-s", "'soon'"),
        ({"max_tokens": 10_000}, "messages", "512 tokens"),
        ({"extra_body": {"temprature": 1}}, "temprature", "temprature"),
    ],
)
async def test_what_is_not_honoured_is_refused_in_words(kit: Kit, fields: Any, param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await kit.openai().chat.completions.create(**({"model": BASE, "messages": ASK} | fields))
    body: Any = caught.value.body
    assert body["param"] == param
    assert words in body["message"]
    assert body["type"] == "invalid_request_error"
    assert kit.sampler.requests == []


@pytest.mark.parametrize(
    ("fields", "priority"), [({}, INTERACTIVE), ({"priority": 3}, 3), ({"priority": 10}, BACKGROUND)]
)
async def test_the_priority_asked_for_reaches_the_engine(kit: Kit, fields: Any, priority: int) -> None:
    await kit.openai().chat.completions.create(model=BASE, messages=ASK, extra_body=fields)
    assert kit.sampler.requests[0].priority == priority


@pytest.mark.parametrize(
    ("key", "model", "tenant"),
    [
        ("key-acme", BASE, "acme"),
        ("key-acme", "acme/adder", "acme"),
        ("key-root", "acme/adder", "acme"),
        ("tml-dev", BASE, ""),
    ],
)
@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_work_counts_for_the_callers_tenant_else_for_the_policys(
    kit: Kit, key: str, model: str, tenant: str, path: str
) -> None:
    client = kit.openai(key)
    if path == "chat":
        await client.chat.completions.create(model=model, messages=ASK, n=2)
    else:
        await client.completions.create(model=model, prompt="1+1=", n=2)
    assert [request.tenant for request in kit.sampler.requests] == [tenant] * 2


@pytest.mark.parametrize(("headers", "wait_s"), [({}, None), ({"mint-wait-s": "2.5"}, 2.5)])
async def test_a_client_may_bound_its_wait_for_the_first_token(kit: Kit, headers: Any, wait_s: float | None) -> None:
    client = kit.openai()
    await client.chat.completions.create(model=BASE, messages=ASK, extra_headers=headers)
    await client.completions.create(model=BASE, prompt="1+1=", extra_headers=headers)
    assert [request.wait_s for request in kit.sampler.requests] == [wait_s] * 2


async def test_what_changes_nothing_is_taken(kit: Kit) -> None:
    nothing: Any = {"tools": [], "response_format": {"type": "text"}, "user": "u", "store": False, "logit_bias": None}
    await kit.openai().chat.completions.create(model=BASE, messages=ASK, **nothing)


async def test_a_prompt_too_long_is_refused_with_the_numbers(kit: Kit) -> None:
    long: Any = [{"role": "user", "content": "x" * 600}]
    with pytest.raises(openai.BadRequestError, match=r"6\d\d tokens and 1 more.*context is 512") as caught:
        await kit.openai().chat.completions.create(model=BASE, messages=long)
    assert caught.value.code == "context_length_exceeded"


async def test_no_replica_is_503_with_retry_after(kit: Kit) -> None:
    kit.sampler.failure = Retryable("no serving replica is alive", delay_s=3.2)
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="no serving replica") as caught:
            await kit.openai().chat.completions.create(model=BASE, messages=ASK, stream=stream)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "4"


async def test_what_serving_refuses_keeps_its_status_and_words(kit: Kit) -> None:
    kit.sampler.failure = Refused("adapter needs base X", "refused", [], 409)
    with pytest.raises(openai.ConflictError, match="adapter needs base X"):
        await kit.openai().chat.completions.create(model="acme/adder", messages=ASK)


async def test_an_answer_from_other_bytes_is_never_passed_on(kit: Kit) -> None:
    kit.sampler.served = Served(BASE, BASE_SHA256, "acme/adder@2", "f" * 64, "replica-0", "boot", "vllm")
    with pytest.raises(openai.InternalServerError, match="adapter sha256"):
        await kit.openai().chat.completions.create(model="acme/adder", messages=ASK)


async def test_a_replica_lost_midway_is_an_error_event_and_no_done(kit: Kit) -> None:
    kit.sampler.failure_midway = Retryable("replica lost")
    async with kit.http() as http:
        body = {"model": BASE, "messages": ASK, "stream": True}
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert "replica lost" in answer.text
        assert "[DONE]" not in answer.text
        with pytest.raises(openai.APIError, match="replica lost"):
            async for _ in await kit.openai().chat.completions.create(model=BASE, messages=ASK, stream=True):
                pass
        assert (await http.post("/v1/chat/completions", json=body | {"stream": False})).status_code == 503
    assert kit.sampler.open == []


async def test_an_aborted_generation_is_no_answer(kit: Kit) -> None:
    kit.sampler.finish = "abort"
    with pytest.raises(openai.InternalServerError, match="try again"):
        await kit.openai().chat.completions.create(model=BASE, messages=ASK)


async def test_many_choices_run_beside_each_other_within_bounds(kit: Kit) -> None:
    most = 0
    reply = kit.sampler.reply

    def watched(request: SampleRequest) -> str:
        nonlocal most
        most = max(most, len(kit.sampler.open))
        return reply(request)

    kit.sampler.reply = watched
    answer = await kit.openai().chat.completions.create(model=BASE, messages=ASK, n=100)
    assert len(answer.choices) == 100
    assert 1 < most <= kit.settings.gateway_parallel_choices


async def test_one_request_id_sent_twice_is_two_requests_to_the_engine(kit: Kit) -> None:
    for _ in range(2):
        await kit.openai().chat.completions.create(
            model=BASE, messages=ASK, n=2, extra_headers={"x-request-id": "mine"}
        )
    ids = [request.request_id for request in kit.sampler.requests]
    assert len(set(ids)) == 4
    assert all(found.startswith("mine-") for found in ids)
