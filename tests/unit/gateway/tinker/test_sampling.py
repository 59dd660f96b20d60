"""Sampling sessions and samples: what is asked of the worker, and results in both encodings."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from mint_schemas.training import Lora

from services.gateway.tinker import sampling
from services.gateway.tinker import wire_pb2 as wire
from services.gateway.tinker.body import message
from services.gateway.tinker.messages import Sample
from shared.errors import Busy
from tests.unit.gateway.kit import BASE
from tests.unit.gateway.tinker.kit import TAKES_PROTOBUF, Scene

PATH = "tinker://session-9:train:0/sampler_weights/first"
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]}


async def sampler(scene: Scene, number: int = 0, **source: Any) -> str:
    body = {"session_id": scene.session_id, "sampling_session_seq_id": number, **(source or {"base_model": BASE})}
    answer = await scene.post("create_sampling_session", body)
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["sampling_session_id"]
    return found


def ask(session: str, seq_id: int = 0, params: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    head = {"sampling_session_id": session, "seq_id": seq_id, "prompt": PROMPT, "type": "sample"}
    return head | {"sampling_params": {"max_tokens": 4} if params is None else params, **more}


async def asked(scene: Scene) -> Any:
    return await scene.kit.operations.payload(scene.kit.operations.samples[-1])


async def test_a_sampler_says_what_it_samples_with(scene: Scene) -> None:
    scene.kit.operations.add_path(PATH, "acme", BASE, Lora())
    base, tuned = await sampler(scene), await sampler(scene, 1, model_path=PATH)
    shown = await scene.http.get(f"/api/v1/samplers/{base}")
    assert shown.json() == {"sampler_id": base, "base_model": BASE}
    found = (await scene.http.get(f"/api/v1/samplers/{tuned}")).json()
    assert found["model_path"] == PATH
    assert found["revision"] == "acme/tinker-1@1"
    async with scene.kit.http("key-beta") as http:
        assert (await http.get(f"/api/v1/samplers/{base}")).status_code == 404


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ({"model_path": "weights/x"}, 400),
        ({"model_path": PATH}, 404),
        ({"base_model": "another"}, 400),
        ({"model_path": None}, 422),
    ],
)
async def test_a_sampler_needs_something_that_is_there(scene: Scene, source: dict[str, Any], status: int) -> None:
    body = {"session_id": scene.session_id, "sampling_session_seq_id": 0, **source}
    assert (await scene.post("create_sampling_session", body)).status_code == status


async def test_a_json_client_samples(scene: Scene) -> None:
    session = await sampler(scene)
    answer = await scene.post("asample", ask(session, num_samples=2, prompt_logprobs=True, topk_prompt_logprobs=2))
    request_id = answer.json()["request_id"]
    assert answer.json()["sample_sequence_ids"] == [f"{request_id}:0", f"{request_id}:1"]
    result = await scene.retrieve(answer)
    sequence = {"stop_reason": "stop", "tokens": [5, 6], "logprobs": [-0.25, -0.5]}
    assert result.json() == {
        "type": "sample",
        "sequences": [sequence, sequence],
        "prompt_logprobs": [None, -1.0, -1.0],
        "topk_prompt_logprobs": [None, [[7, -0.125], [8, -2.0]], [[7, -0.125], [8, -2.0]]],
    }
    assert result.headers["mint-revision"] == "acme/tinker-1@1"
    assert result.headers["mint-adapter-sha256"] == "a" * 64


async def test_prompts_are_parsed_beside_the_event_loop(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def seen(body: bytes, kind: type[Sample]) -> Sample:
        threads.append(threading.current_thread())
        return message(body, kind)

    monkeypatch.setattr(sampling, "message", seen)
    long = ask(await sampler(scene)) | {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 400_000}]}}
    assert (await scene.post("asample", long)).status_code == 200
    assert len((await asked(scene)).prompt) == 400_000
    assert threading.current_thread() not in threads


async def test_a_protobuf_client_samples(scene: Scene) -> None:
    answer = await scene.post("asample", ask(await sampler(scene), prompt_logprobs=True, topk_prompt_logprobs=2))
    result = await scene.retrieve(answer, TAKES_PROTOBUF)
    found = wire.SampleResponse.FromString(result.content)
    (sequence,) = found.sequences
    assert sequence.stop_reason == wire.STOP_REASON_STOP
    assert np.frombuffer(sequence.tokens, np.int32).tolist() == [5, 6]
    assert np.frombuffer(sequence.logprobs, np.float32).tolist() == [-0.25, -0.5]
    prompt = np.frombuffer(found.prompt_logprobs, np.float32)
    assert np.isnan(prompt[0])
    assert prompt[1:].tolist() == [-1.0, -1.0]
    top = found.topk_prompt_logprobs
    assert (top.length, top.k) == (3, 2)
    assert np.frombuffer(top.token_ids, np.int32).reshape(3, 2).tolist() == [[0, 0], [7, 8], [7, 8]]
    assert np.frombuffer(top.logprobs, np.float32).reshape(3, 2).tolist() == [
        [-99999.0] * 2,
        [-0.125, -2.0],
        [-0.125, -2.0],
    ]


async def test_the_top_tokens_of_a_prompt_of_one_token_are_none_and_were_asked_for(scene: Scene) -> None:
    one = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}}
    answer = await scene.post("asample", ask(await sampler(scene), topk_prompt_logprobs=2) | one)
    assert (await scene.retrieve(answer)).json()["topk_prompt_logprobs"] == [None]
    top = wire.SampleResponse.FromString((await scene.retrieve(answer, TAKES_PROTOBUF)).content).topk_prompt_logprobs
    assert (top.length, top.k) == (1, 1)
    assert np.frombuffer(top.logprobs, np.float32).tolist() == [-99999.0]


async def test_what_was_not_asked_for_is_absent(scene: Scene) -> None:
    answer = await scene.post("asample", ask(await sampler(scene)))
    assert (await scene.retrieve(answer)).json().keys() == {"type", "sequences"}
    found = wire.SampleResponse.FromString((await scene.retrieve(answer, TAKES_PROTOBUF)).content)
    assert not found.HasField("prompt_logprobs")
    assert not found.HasField("topk_prompt_logprobs")


@pytest.mark.parametrize(
    ("stop", "strings", "tokens", "ignore_eos"),
    [
        (None, (), (), False),
        ([], (), (), True),
        ("\n", ("\n",), (), False),
        (["a", "b"], ("a", "b"), (), False),
        ([7, 8], (), (7, 8), False),
    ],
)
async def test_stops_are_strings_or_tokens_or_none_at_all(
    scene: Scene, stop: Any, strings: tuple[str, ...], tokens: tuple[int, ...], ignore_eos: bool
) -> None:
    params = {"max_tokens": 4, "seed": 2**64 - 1, "temperature": 0, "top_k": 5, "top_p": 0.5}
    await scene.post("asample", ask(await sampler(scene), params=params | ({} if stop is None else {"stop": stop})))
    found = await asked(scene)
    assert (found.stop_strings, found.stop_tokens, found.ignore_eos) == (strings, tokens, ignore_eos)
    assert (found.seed, found.temperature, found.top_k, found.top_p) == (2**64 - 1, 0.0, 5, 0.5)
    assert found.prompt.tolist() == [1, 2, 3]


async def test_samples_are_numbered_from_0_and_a_clones_numbers_are_long(scene: Scene) -> None:
    session = await sampler(scene)
    first, again = [await scene.post("asample", ask(session, 0)) for _ in range(2)]
    clone = await scene.post("asample", ask(session, 999_999_999 * 10**9))
    other = await scene.post("asample", ask(session, 0, num_samples=2))
    assert first.json() == again.json()
    assert clone.status_code == 200
    assert other.status_code == 409


async def test_without_a_session_the_source_is_in_the_request(scene: Scene) -> None:
    body = {"prompt": PROMPT, "sampling_params": {"max_tokens": 1}, "base_model": BASE}
    answers = [await scene.post("asample", body) for _ in range(2)]
    assert len({answer.json()["request_id"] for answer in answers}) == 2
    assert scene.kit.operations.samples[-1].base == BASE


async def test_too_many_open_samples_are_told_to_wait(scene: Scene) -> None:
    session = await sampler(scene)
    scene.kit.operations.full = Busy("4096 samples are open", "too_many_samples", status=429, delay_s=3)
    answer = await scene.post("asample", ask(session))
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"topk_sample_logprobs": 1}, "topk_sample_logprobs"),
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 100_000}, "num_samples"),
        ({"seq_id": -1}, "seq_id"),
        ({"seq_id": None}, "seq_id"),
        ({"base_model": BASE}, "leave base_model"),
        ({"prompt": {"chunks": []}}, "no token"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "image"),
        ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "token id"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"stop": [1, "a"]}}, "stop"),
        ({"sampling_params": {"stop": [""]}}, "stop"),
        ({"sampling_params": {"stop": ["a"] * 65}}, "stop"),
        ({"sampling_params": {"min_p": 0.1}}, "min_p"),
    ],
)
async def test_what_cannot_be_sampled_is_refused_by_name(scene: Scene, change: dict[str, Any], words: str) -> None:
    session = await sampler(scene)
    answer = await scene.post("asample", ask(session) | change)
    assert answer.status_code in (400, 422)
    assert words in answer.json()["error"]
    assert scene.kit.operations.samples == []
    assert (await scene.post("asample", ask(session))).status_code == 200


async def test_what_clients_send_by_default_is_allowed(scene: Scene) -> None:
    defaults = {"prompt_logprobs": False, "topk_prompt_logprobs": 0, "topk_sample_logprobs": 0}
    answer = await scene.post(
        "asample",
        ask(await sampler(scene)) | defaults | {"prompt_alt_tokens_k": 0, "record_stability_info": False},
    )
    assert answer.status_code == 200


async def test_a_sample_is_cancelled_by_its_tenant_alone(scene: Scene) -> None:
    answer = await scene.post("asample", ask(await sampler(scene)))
    ref = {"request_id": answer.json()["request_id"]}
    async with scene.kit.http("key-beta") as http:
        assert (await http.post("/api/v1/cancel_future", json=ref)).status_code == 404
    assert (await scene.post("cancel_future", ref)).status_code == 204
    assert scene.kit.operations.cancelled == [ref["request_id"]]
