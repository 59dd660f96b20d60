"""/tokenize and /detokenize, at the root and under /v1, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import pytest

from shared.residency import Replica
from tests.unit.gateway.kit import BASE, CODEC, Kit

PREFIXES = ["", "/v1"]


async def _post(kit: Kit, path: str, body: dict[str, Any], key: str = "tml-dev") -> Any:
    async with kit.http(key) as http:
        return await http.post(path, json=body)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("model", [BASE, "acme/adder", "acme/adder@3"])
async def test_a_text_becomes_tokens_and_the_text_again(kit: Kit, prefix: str, model: str) -> None:
    text = "1 + é = <|im_end|>"
    found = await _post(kit, f"{prefix}/tokenize", {"model": model, "prompt": text, "return_token_strs": True})
    tokens = CODEC.encode(text)
    assert found.json() == {
        "count": len(tokens),
        "max_model_len": 512,
        "tokens": tokens,
        "token_strs": [CODEC.token_name(token) for token in tokens],
    }
    assert found.json()["token_strs"][1] == "Ġ"
    back = await _post(kit, f"{prefix}/detokenize", {"model": model, "tokens": tokens})
    assert back.json() == {"prompt": text}


async def test_a_chats_tokens_are_those_that_it_is_answered_from(kit: Kit) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    found = (await _post(kit, "/tokenize", {"model": BASE, "messages": messages})).json()
    await kit.openai().chat.completions.create(model=BASE, messages=messages)  # type: ignore[arg-type]
    assert tuple(found["tokens"]) == kit.sampler.requests[0].prompt
    assert found["token_strs"] is None
    ask = {"model": BASE, "messages": messages, "add_generation_prompt": False}
    closed = (await _post(kit, "/tokenize", ask)).json()["tokens"]
    assert found["tokens"] == [*closed, *CODEC.encode("<|im_start|>assistant\n")]


async def test_the_length_is_what_every_replica_takes(kit: Kit) -> None:
    fields = {"boot_id": "b", "url": "", "base": BASE, "token": "t", "engine": "fake", "dtype": "float32", "at": 0.0}
    sizes = {"max_rank": 8, "slots": 1, "max_resident": 1, "ready": ()}
    kit.replicas.alive = [
        Replica.model_validate({"replica": f"r-{tokens}", "max_context": tokens, **fields, **sizes})
        for tokens in (100, 200, None)
    ]
    assert (await _post(kit, "/tokenize", {"model": BASE, "prompt": "x"})).json()["max_model_len"] == 100


async def test_model_may_be_left_out_where_there_is_one_base(kit: Kit) -> None:
    assert (await _post(kit, "/tokenize", {"prompt": "x"})).json()["count"] == 1
    kit.bases["other/base"] = kit.bases[BASE]
    refused = await _post(kit, "/tokenize", {"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {"model": BASE}, "either prompt or messages"),
        ("/tokenize", {"model": BASE, "prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "either"),
        ("/tokenize", {"model": BASE, "messages": []}, "messages"),
        ("/tokenize", {"model": BASE, "prompt": "x", "chat_template": "x"}, "chat_template"),
        ("/detokenize", {"model": BASE}, "tokens"),
        ("/detokenize", {"model": BASE, "tokens": [1, 258]}, "258 is outside 0 to 257"),
        ("/detokenize", {"model": BASE, "tokens": [-1]}, "outside"),
        ("/detokenize", {"model": BASE, "tokens": [True]}, "tokens"),
    ],
)
async def test_what_cannot_be_is_refused_in_words(kit: Kit, path: str, body: dict[str, Any], words: str) -> None:
    refused = await _post(kit, path, body)
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_key_is_needed_and_other_tenants_models_are_unknown(kit: Kit, prefix: str) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})]
    for path, body in bodies:
        assert (await _post(kit, prefix + path, body, key="")).status_code == 401
        refused = await _post(kit, prefix + path, body | {"model": "beta/secret"}, key="key-acme")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert ("resolve", "beta/secret") not in kit.catalog.calls


async def test_an_empty_text_has_no_tokens(kit: Kit) -> None:
    assert (await _post(kit, "/tokenize", {"prompt": ""})).json()["tokens"] == []
    assert (await _post(kit, "/detokenize", {"tokens": []})).json() == {"prompt": ""}
