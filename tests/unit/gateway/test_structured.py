"""Structured output: what becomes a grammar, what comes back, and what is refused in words."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from services.gateway.openai.schemas import MAX_DEPTH, MAX_PROPERTIES, MAX_SCHEMA_BYTES
from shared.engine.port import Grammar
from shared.errors import Retryable
from tests.unit.gateway.declaring import declaring, replica
from tests.unit.gateway.kit import BASE, Kit

ASK: Any = [{"role": "user", "content": "What is 1+1?"}]
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
PLACES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/completions": {"prompt": "1+1="},
}


class Sum(BaseModel):
    sum: int


def _named(schema: Any, name: str = "sum") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


async def _post(kit: Kit, path: str, fields: dict[str, Any]) -> Any:
    async with kit.http() as http:
        body = json.dumps({"model": BASE, **PLACES[path], **fields})
        return await http.post(path, content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": _named(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"regex": "[0-9]{1,4}"}}, "regex", "[0-9]{1,4}"),
    ],
)
async def test_each_way_to_ask_becomes_one_grammar(path: str, fields: Any, kind: Any, text: str) -> None:
    kit = declaring()
    assert (await _post(kit, path, fields)).status_code == 200
    assert kit.sampler.requests[0].settings.grammar == Grammar(kind, text)


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
async def test_without_any_there_is_no_grammar_and_nothing_need_be_declared(path: str, fields: Any) -> None:
    kit = declaring(structured_output=False)
    assert (await _post(kit, path, fields)).status_code == 200
    assert kit.sampler.requests[0].settings.grammar is None


async def test_an_answer_under_a_schema_parses_into_the_clients_own_type() -> None:
    kit = declaring()
    kit.sampler.reply = lambda request: '{"sum": 2}' if request.settings.grammar else "two"
    answer = await kit.openai().chat.completions.parse(model=BASE, messages=ASK, response_format=Sum)
    assert answer.choices[0].message.parsed == Sum(sum=2)
    grammar = kit.sampler.requests[0].settings.grammar
    assert grammar is not None
    assert json.loads(grammar.text)["properties"] == {"sum": {"title": "Sum", "type": "integer"}}


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
async def test_a_streamed_answer_under_a_schema_joins_to_what_parses(chunk_tokens: int) -> None:
    kit = declaring()
    kit.sampler.chunk_tokens = chunk_tokens
    kit.sampler.reply = lambda request: '{"sum": 2}' if request.settings.grammar else "two"
    stream = await kit.openai().chat.completions.create(
        model=BASE, messages=ASK, stream=True, response_format={"type": "json_object"}
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert json.loads(text) == {"sum": 2}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"type": "array", "items": schema}
    return schema


def _wide(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


REFUSED_SCHEMAS = [
    ({"type": "objekt"}, "no JSON Schema"),
    ({"type": "object", "required": "sum"}, "no JSON Schema"),
    ({"properties": {"\ud800": {"type": 3}}}, "no JSON Schema"),
    ({"$schema": 3}, "$schema"),
    ({"type": "string", "description": "x" * MAX_SCHEMA_BYTES}, f"at most {MAX_SCHEMA_BYTES} are allowed"),
    (_nested(MAX_DEPTH + 1), f"more than {MAX_DEPTH} deep"),
    (_wide(MAX_PROPERTIES + 1), f"more than {MAX_PROPERTIES} properties"),
    ({"$ref": "https://example.org/schema"}, "leads out of the schema"),
    ({"$ref": "file:///etc/passwd"}, "leads out of the schema"),
    ({"properties": {"enum": {"$ref": "other.json"}}}, "leads out of the schema"),
    ({"$ref": "#/$defs/none"}, "leads to nothing"),
    ({"$ref": "#/default", "default": {"pattern": "x"}}, "holds values"),
    ({"$dynamicRef": "#x"}, "$dynamicRef"),
    ({"$ref": "#"}, "back to itself"),
    ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#"}]}}}, "back to itself"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "back to itself"),
    ({"type": "string", "maxLength": 10_001}, "at most 10000"),
    ({"type": "array", "maxItems": 101, "items": {"type": "string", "maxLength": 100}}, "10100; at most 10000"),
    ({"type": "string", "pattern": "(a"}, "does not compile"),
    ({"patternProperties": {"((a{1000}){1000}){1000}": {}}}, "places when its repeats"),
    ({"properties": {"default": {"pattern": "(?=a)"}}}, "lookahead"),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED_SCHEMAS)
@pytest.mark.parametrize("path", PLACES)
async def test_a_schema_that_cannot_be_followed_is_refused_by_field(path: str, schema: Any, words: str) -> None:
    kit = declaring()
    asked: list[tuple[str, Any]] = [("response_format", _named(schema)), ("structured_outputs", {"json": schema})]
    for param, value in asked:
        answer = await _post(kit, path, {param: value})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert words in error["message"]
    assert kit.sampler.requests == []


@pytest.mark.parametrize(
    "schema",
    [
        _nested(MAX_DEPTH),
        _wide(MAX_PROPERTIES),
        {"type": "object", "properties": {"next": {"$ref": "#"}, "pattern": {"type": "string"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"a~/b": {}},
            "$ref": "#/definitions/a~0~1b",
        },
        {"enum": [{"$ref": "https://example.org"}], "default": {"pattern": "("}},
        {"type": "array", "maxItems": 100, "items": {"type": "string", "maxLength": 100}},
    ],
)
async def test_a_schema_at_the_bounds_is_taken(schema: Any) -> None:
    kit = declaring()
    answer = await _post(kit, "/v1/completions", {"structured_outputs": {"json": schema}})
    assert answer.status_code == 200, answer.text
    grammar = kit.sampler.requests[0].settings.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == schema


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(a", "does not compile"),
        ("a" * 4097, "at most 4096"),
        ("", "empty"),
        ("a\0", "NUL"),
        ("\ud800", "does not compile"),
        ("(" * 4000, "does not compile"),
        ("a{99999999999999}", "does not compile"),
        ("((a{1000}){1000}){1000}", "1000000000 places"),
        ("(?:a{0,101}b){100}", "10200 places"),
        ("a(?=b)", "lookahead"),
        ("a(?<!b)", "lookbehind"),
        (r"(a)\1", "back to a group"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        ("a*+", "possessive"),
        ("(?>a)", "atomic"),
        (r"\bword\b", "anchor"),
    ],
)
async def test_a_pattern_that_engines_could_not_follow_is_refused(pattern: str, words: str) -> None:
    kit = declaring()
    answer = await _post(kit, "/v1/chat/completions", {"structured_outputs": {"regex": pattern}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs"
    assert words in answer.json()["error"]["message"]
    assert kit.sampler.requests == []


@pytest.mark.parametrize("pattern", [r"^\d{4}-\d{2}-\d{2}$", "(yes|no)", "[[a-z]+", ".*", "(?:a{0,99}b){100}"])
async def test_a_pattern_of_bounded_size_is_taken(pattern: str) -> None:
    kit = declaring()
    answer = await _post(kit, "/v1/chat/completions", {"structured_outputs": {"regex": pattern}})
    assert answer.status_code == 200
    assert kit.sampler.requests[0].settings.grammar == Grammar("regex", pattern)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "'xml' is not known"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "is required"),
        ({"response_format": _named([])}, "response_format", "an object is expected"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format",
            "name",
        ),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "no such field"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of regex and json"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one of regex and json"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs", "no such field"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "no JSON"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs", "a JSON object"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "leave one out",
        ),
        ({"guided_json": SCHEMA}, "guided_json", "structured_outputs"),
        ({"guided_regex": "a"}, "guided_regex", "structured_outputs"),
    ],
)
@pytest.mark.parametrize("path", PLACES)
async def test_what_asks_for_no_grammar_is_refused(path: str, fields: Any, param: str, words: str) -> None:
    kit = declaring()
    answer = await _post(kit, path, fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize(
    ("param", "value"),
    [("response_format", {"type": "json_object"}), ("structured_outputs", {"regex": "a"})],
)
async def test_an_engine_without_it_is_named(path: str, param: str, value: Any) -> None:
    kit = declaring(structured_output=False)
    kit.replicas.alive = [replica(engine="transformers")]
    answer = await _post(kit, path, {param: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert "engine transformers has no structured output" in error["message"]
    assert kit.sampler.requests == []


async def test_one_replica_that_declares_it_is_enough() -> None:
    kit = declaring()
    kit.replicas.alive.append(replica("replica-1", engine="transformers"))
    assert (await _post(kit, "/v1/completions", {"structured_outputs": {"regex": "a"}})).status_code == 200


async def test_with_no_replica_alive_it_is_the_usual_503() -> None:
    kit = Kit()
    kit.sampler.failure = Retryable("no serving replica is alive", delay_s=3.2)
    with pytest.raises(openai.InternalServerError, match="no serving replica") as caught:
        await kit.openai().chat.completions.create(model=BASE, messages=ASK, response_format={"type": "json_object"})
    assert caught.value.status_code == 503
