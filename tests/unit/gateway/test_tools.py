"""Tool calls at the gateway's surface: what the model is shown, what comes back, what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from tests.unit.gateway.declaring import declaring, replica
from tests.unit.gateway.kit import BASE, CODEC, END, Kit

ASK: Any = [{"role": "user", "content": "What is 1+1?"}]


def tool(name: str, parameters: Any = None, **fields: Any) -> Any:
    described = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **described, **fields}}


NUMBERS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}, "b": {"$ref": "#/$defs/number"}},
    "required": ["a", "b"],
    "$defs": {"number": {"type": "integer"}},
}
ADD, NOW = tool("add", NUMBERS, description="Adds."), tool("now")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'


def _prompt(kit: Kit) -> str:
    return CODEC.decode(kit.sampler.requests[-1].prompt, skip_special=False)


async def _create(kit: Kit, **fields: Any) -> Any:
    return await kit.openai().chat.completions.create(
        **({"model": BASE, "messages": ASK, "tools": [ADD, NOW]} | fields)
    )


async def test_the_model_is_shown_the_tools_and_the_format() -> None:
    kit = declaring()
    await _create(kit, messages=[{"role": "system", "content": "Be brief."}, *ASK])
    prompt = _prompt(kit)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    shown = {"name": "add", "description": "Adds.", "parameters": NUMBERS}
    assert json.dumps({"type": "function", "function": shown}) in prompt
    assert '"name": "now", "parameters": {"type": "object", "properties": {}}' in prompt
    assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
    assert kit.sampler.requests[0].settings.grammar is None


async def test_a_call_comes_back_as_one() -> None:
    kit = declaring()
    kit.sampler.reply = lambda _: f"Let me see.\n{CALL}"
    answer = await _create(kit)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "add", '{"a": 1, "b": 1}')
    assert re.fullmatch("call_[0-9a-f]{24}", call.id)
    assert answer.usage.completion_tokens == len(f"Let me see.\n{CALL}") + 1


async def test_content_is_null_beside_calls_alone_and_ids_differ() -> None:
    kit = declaring()
    kit.sampler.reply = lambda _: f"{CALL}\n{CALL}"
    answer = await _create(kit, n=2)
    assert [choice.message.content for choice in answer.choices] == [None, None]
    assert len({call.id for choice in answer.choices for call in choice.message.tool_calls}) == 4


@pytest.mark.parametrize(
    "reply",
    [
        "Two.",
        '<tool_call>\n{"name": "add"}\n</tool_call>',
        CALL.replace("add", "subtract"),
        CALL.removesuffix("</tool_call>"),
    ],
)
async def test_what_is_no_call_of_a_known_tool_stays_content(reply: str) -> None:
    kit = declaring()
    kit.sampler.reply = lambda _: reply
    choice = (await _create(kit)).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (reply, None, "stop")


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 7, 1000])
async def test_a_stream_never_shows_half_a_tag_and_joins_to_the_whole_answer(chunk_tokens: int) -> None:
    kit = declaring()
    kit.sampler.chunk_tokens = chunk_tokens
    kit.sampler.reply = lambda _: f"So <b>: \n{CALL}\n{CALL}\n"
    chunks = [chunk async for chunk in await _create(kit, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "So <b>:"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert [(call.type, call.function.name) for call in calls] == [("function", "add")] * 2
    assert [call.function.arguments for call in calls] == ['{"a": 1, "b": 1}'] * 2
    assert len({call.id for call in calls}) == 2
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_at_most_ends_the_generation_behind_the_first(stream: bool) -> None:
    kit = declaring()
    kit.sampler.reply = lambda _: f"{CALL}\n{CALL}" + " more" * 100
    answer = await _create(kit, parallel_tool_calls=False, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta async for chunk in answer]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
    else:
        calls = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.usage.completion_tokens == len(CALL)
    assert len(calls) == 1
    (sent,) = kit.sampler.sent.values()
    assert sent <= len(CALL) + kit.sampler.chunk_tokens
    assert kit.sampler.open == []


FORCED: list[tuple[Any, list[Any], set[str]]] = [
    ("required", [ADD, NOW], {"add", "now"}),
    ("required", [ADD], {"add"}),
    ({"type": "function", "function": {"name": "add"}}, [NOW, ADD], {"add"}),
]


@pytest.mark.parametrize(("choice", "tools", "allowed"), FORCED)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_asked_for_is_begun_in_the_prompt_and_held_by_a_grammar(
    choice: Any, tools: list[Any], allowed: set[str], stream: bool
) -> None:
    kit = declaring()
    written = '{"name": "add", "arguments": {"a": 1, "b": 1}}'
    kit.sampler.reply = lambda _: written
    answer = await _create(kit, tools=tools, tool_choice=choice, stream=stream)
    if stream:
        chunks = [chunk async for chunk in answer]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
        (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    else:
        (call,) = answer.choices[0].message.tool_calls
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 1}')
    assert _prompt(kit).endswith("<|im_start|>assistant\n<tool_call>\n")
    grammar = kit.sampler.requests[0].settings.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    fits = Draft202012Validator(json.loads(grammar.text)).is_valid
    assert fits(json.loads(written))
    assert fits({"name": "now", "arguments": {}}) is ("now" in allowed)
    assert not fits({"name": "add", "arguments": {"a": 1}})
    assert not fits({"name": "add", "arguments": {"a": 1, "b": "1"}}), "references lead to where they led"
    assert not fits({"name": "subtract", "arguments": {}})


async def test_a_forced_call_cut_at_its_length_is_content() -> None:
    kit = declaring()
    kit.sampler.reply = lambda _: '{"name": "add", "arguments": {"a": 1, "b": 1}}'
    choice = (await _create(kit, tool_choice="required", max_tokens=10)).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ('{"name": "', None, "length")


async def test_no_call_wanted_is_no_tool_shown_and_none_read() -> None:
    kit = declaring(structured_output=False, tools=False)
    kit.sampler.reply = lambda _: CALL
    choice = (await _create(kit, tool_choice="none")).choices[0]
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
    assert "# Tools" not in _prompt(kit)


async def test_results_go_back_in_the_format_that_the_model_knows() -> None:
    kit = declaring()
    kit.sampler.reply = lambda _: f"{CALL}\n{CALL}"
    first = (await _create(kit)).choices[0].message
    kit.sampler.reply = lambda _: "Two."
    results = [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in first.tool_calls]
    answer = await _create(kit, messages=[*ASK, first.model_dump(), *results])
    assert answer.choices[0].message.content == "Two."
    response = "<tool_response>\n2\n</tool_response>"
    assert _prompt(kit).endswith(
        f"<|im_start|>assistant\n{CALL}\n{CALL}<|im_end|>\n"
        f"<|im_start|>user\n{response}\n{response}<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_logprobs_beside_calls_are_those_of_the_content() -> None:
    kit = declaring()
    kit.sampler.reply = lambda _: f"So: \n{CALL}"
    whole = (await _create(kit, logprobs=True)).choices[0]
    assert [entry.token for entry in whole.logprobs.content] == ["S", "o", ":"]
    kit.sampler.chunk_tokens = 1
    streamed: list[Any] = []
    async for chunk in await _create(kit, logprobs=True, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert streamed == whole.logprobs.content


class Add(BaseModel):
    a: int
    b: int


async def test_the_openai_packages_own_tools_parse() -> None:
    kit = declaring()
    kit.sampler.reply = lambda _: CALL.replace('"add"', '"Add"')
    tools = [openai.pydantic_function_tool(Add)]
    answer = await kit.openai().chat.completions.parse(model=BASE, messages=ASK, tools=tools)
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.parsed_arguments == Add(a=1, b=1)


MADE = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "2"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [ADD, ADD]}, "tools", "'add' more than once"),
        ({"tools": [tool("f", {"type": "array"})]}, "tools", '"type": "object"'),
        ({"tools": [tool("f", {"type": "object", "properties": {"a": {"$ref": "http://x"}}})]}, "tools", "leads out"),
        ({"tools": [tool("f", {"type": "object", "required": 1})]}, "tools", "tools.0.function.parameters (f)"),
        ({"tools": [tool("f g")]}, "tools", "pattern"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "'function'"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "at most 128"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice", "'sub'"),
        ({"tool_choice": "always"}, "tool_choice", "'required'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "tools lists none"),
        ({"response_format": {"type": "json_object"}}, "response_format", "cannot hold for one answer"),
        ({"messages": [*ASK, RESULT]}, "messages", "no assistant turn before it called"),
        ({"messages": [{"role": "tool", "content": "2"}]}, "messages", "tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages", "tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [MADE]}]}, "messages", "assistant"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages", "content is required"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [MADE | {"function": {"name": "f", "arguments": "1"}}]}]},
            "messages",
            "a JSON object",
        ),
        ({"extra_body": {"functions": [{"name": "f"}]}}, "functions", "tools and tool_choice"),
    ],
)
async def test_what_cannot_be_called_is_refused_in_words(fields: Any, param: str, words: str) -> None:
    kit = declaring()
    with pytest.raises(openai.BadRequestError) as caught:
        await _create(kit, **fields)
    body: Any = caught.value.body
    assert body["param"] == param
    assert words in body["message"]
    assert kit.sampler.requests == []


@pytest.mark.parametrize(
    ("structured_output", "tools", "choice", "param", "words"),
    [
        (True, False, "auto", "tools", "engine transformers has no tool calls"),
        (False, True, "required", "tool_choice", "engine transformers has no structured output"),
        (False, True, {"type": "function", "function": {"name": "add"}}, "tool_choice", "no structured output"),
    ],
)
async def test_an_engine_without_it_is_named(
    structured_output: bool, tools: bool, choice: Any, param: str, words: str
) -> None:
    kit = declaring()
    kit.replicas.alive = [replica(engine="transformers", structured_output=structured_output, tools=tools)]
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await _create(kit, tool_choice=choice)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")
    assert kit.sampler.requests == []


async def test_free_calls_need_no_structured_output() -> None:
    kit = declaring(structured_output=False)
    kit.sampler.reply = lambda _: CALL
    assert (await _create(kit)).choices[0].finish_reason == "tool_calls"
    assert kit.sampler.requests[0].settings.stop_token_ids == (END,)
