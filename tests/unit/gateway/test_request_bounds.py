"""What a request may be at most: beyond it, 400 and the field's name, before any work is done for it."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from services.gateway import resolution
from services.gateway.openai import calls, generate
from services.gateway.openai.calls import ToolText
from services.gateway.openai.choice import Piece, ToolCall
from services.gateway.openai.schemas import MAX_PLACES
from shared.validation import in_words
from tests.unit.gateway.declaring import declaring
from tests.unit.gateway.kit import BASE, CODEC, Kit

CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/v1/tokenize", "/v1/detokenize"
ASK = [{"role": "user", "content": "1+1?"}]
DEFAULTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK},
    TEXT: {"prompt": "x"},
    TOKENIZE: {},
    DETOKENIZE: {},
}


async def _post(kit: Kit, path: str, fields: dict[str, Any]) -> Any:
    async with kit.http() as http:
        body = json.dumps({"model": BASE, **DEFAULTS[path], **fields})
        return await http.post(path, content=body, headers={"content-type": "application/json"})


def _tool(parameters: Any, name: str = "add", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def _call(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [*ASK, {"role": "assistant", "tool_calls": [call]}]


UNSORTABLE = [n if n % 2 else str(n) for n in range(MAX_PLACES + 1)]
AN_OBJECT = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": ASK * 4097}, "messages"),
        (CHAT, {"messages": [1] * 4097}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1025}]}, "messages"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": _call("{}")[1]["tool_calls"] * 129}]}, "messages"),
        (CHAT, {"messages": _call('{"a": NaN}')}, "messages"),
        (CHAT, {"messages": _call('{"a": 1e999}')}, "messages"),
        (CHAT, {"messages": _call('{"a": "\\ud83d"}')}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "name": "ann"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "lang": "en"}]}]}, "messages"),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        (CHAT, {"tools": [_tool({"type": UNSORTABLE})]}, "tools"),
        (CHAT, {"tools": [_tool(AN_OBJECT | {"enum": UNSORTABLE[:1000]}, f"f{n}") for n in range(3)]}, "tools"),
        (CHAT, {"tools": [_tool({"type": "object", "anyOf": [{}] * MAX_PLACES})]}, "tools"),
        (CHAT, {f"f{n}": 1 for n in range(99)}, None),
        (TOKENIZE, {"messages": [ASK[0] | {"reasoning": "x"}]}, None),
        (TOKENIZE, {"messages": ASK * 4097}, "messages"),
        (DETOKENIZE, {"tokens": [1] * (2**20 + 1)}, "tokens"),
        (TEXT, {"prompt": ["x"] * 4097}, "prompt"),
        (TEXT, {"prompt": [[1]] * 4097}, "prompt"),
        (TEXT, {"prompt": [1] * (2**20 + 1)}, "prompt"),
        (TEXT, {"prompt": "x" * 100_000}, "prompt"),
        (TEXT, {"prompt": ["x"] * 1025}, "n"),
        (TEXT, {"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
        (TEXT, {"logit_bias": {f"x{n}": 1 for n in range(1025)}}, "logit_bias"),
        (TEXT, {"stop": "x" * 257}, "stop"),
        (TEXT, {"top_k": 2**31}, "top_k"),
        (TEXT, {"top_k": 10**30}, "top_k"),
        (TEXT, {"prompt": ["x" * 200] * 1024, "max_tokens": 0, "echo": True, "logprobs": 20}, "logprobs"),
        (TEXT, {"temperature": 1e-46}, "temperature"),
        (TEXT, {"temperature": 9e-6}, "temperature"),
        (TEXT, {"temperature": "0.5"}, "temperature"),
        (TEXT, {"logprobs": True}, "logprobs"),
        (TEXT, {"n": "5"}, "n"),
        (TEXT, {"best_of": True}, "best_of"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
async def test_what_is_beyond_a_bound_is_refused_by_its_name(path: str, fields: Any, param: str | None) -> None:
    kit = declaring()
    refused = await _post(kit, path, fields)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert len(error["message"]) < 2000
    assert kit.sampler.requests == []


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": _call("")}),
        (CHAT, {"messages": [*_call("{}"), {"role": "tool", "tool_call_id": "c", "name": "add", "content": "2"}]}),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 5}),
        (TEXT, {"stop": ["x" * 256] * 4, "top_k": 2**31 - 1, "temperature": 1e-5, "best_of": 1}),
        (TEXT, {"logit_bias": {str(n): 1 for n in range(256)}, "temperature": 1}),
    ],
)
async def test_what_is_at_a_bound_passes(path: str, fields: Any) -> None:
    answer = await _post(declaring(), path, fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#/x"}}, "x": {"anyOf": 5}},
        {"properties": {"anyOf": True, "a": {"$ref": "#/properties"}}},
        {"$schema": "http://json-schema.org/draft-03/schema#", "anyOf": 5},
    ],
)
async def test_what_the_metaschema_never_saw_is_no_failure(schema: dict[str, Any]) -> None:
    answer = await _post(declaring(), CHAT, {"tools": [_tool({"type": "object", **schema})]})
    assert answer.status_code in (200, 400)


async def test_too_many_choices_are_refused_before_a_text_is_encoded(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    monkeypatch.setattr(type(CODEC), "encode", lambda _self, text, **_options: encoded.append(text) or [1])
    assert (await _post(kit, TEXT, {"prompt": ["x"] * 9, "n": 128})).json()["error"]["param"] == "n"
    assert encoded == []


def test_of_many_faults_the_first_are_said_and_their_inputs_are_cut() -> None:
    class Long(str):
        def __repr__(self) -> str:
            raise AssertionError("the whole input was written out")

    one = {"loc": ("a",), "type": "int_type", "msg": "an integer is expected", "input": Long("x" * 10**6)}
    words = in_words([one] * 1000)
    assert len(words) == 21
    assert words[-1] == "and 980 more"
    assert all(len(sentence) < 200 for sentence in words)


def test_a_run_of_whitespace_is_read_once_a_piece() -> None:
    """A pattern that is tried from each of its places takes as many steps as its length squared: here 10^12."""
    text = ToolText(frozenset({"add"}), single=False)
    run = " " * 10**6
    assert text.push(Piece(run + "x")).text == run + "x"
    assert text.push(Piece(run)).text == ""
    assert text.push(Piece("<tool")).text == ""
    assert text.push(Piece("x")).text == f"{run}<toolx"


def test_an_open_string_is_read_on_from_where_it_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    pattern = calls._STRING

    class Counting:
        def match(self, text: str, at: int) -> Any:
            found = pattern.match(text, at)
            assert found is not None
            read.append(found.end() - at)
            return found

    monkeypatch.setattr(calls, "_STRING", Counting())
    whole = '<tool_call>{"name": "add", "arguments": {"a": "' + 'say \\"hi\\" ' * 200 + '"}}</tool_call>'
    text = ToolText(frozenset({"add"}), single=False)
    found: list[ToolCall] = [call for sign in whole for call in text.push(Piece(sign)).calls]
    assert [call.name for call in found] == ["add"]
    assert sum(read) <= len(whole)


async def test_an_echoed_prompt_is_read_once_for_all_its_choices(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = generate.prompt_piece

    def counted(*args: Any) -> Piece:
        made.append(args[1])
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return real(*args)

    monkeypatch.setattr(generate, "prompt_piece", counted)
    answer = await _post(kit, TEXT, {"prompt": ["ab", "cd"], "n": 3, "echo": True, "logprobs": 1})
    assert [choice["text"][:2] for choice in answer.json()["choices"]] == ["ab"] * 3 + ["cd"] * 3
    assert sorted(made) == sorted([tuple(CODEC.encode("ab")), tuple(CODEC.encode("cd"))])


async def test_a_name_with_a_control_character_is_no_place_in_the_list(kit: Kit) -> None:
    async with kit.http() as http:
        refused = await http.get("/v1/models?after=%00")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")
    assert kit.catalog.calls == []


async def test_near_names_are_sought_beside_the_loop(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    real = resolution._close

    def recorded(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*args)

    monkeypatch.setattr(resolution, "_close", recorded)
    refused = await _post(kit, TEXT, {"model": "Addr"})
    assert refused.status_code == 404
    assert len(threads) == 1
    assert threads[0] != "MainThread"
