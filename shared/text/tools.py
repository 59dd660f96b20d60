"""Tool calls as text, in the one format that is spoken here: `<tool_call>` around a JSON object.

In: messages with `tool_calls` and turns of role `tool`, and the tools that may be called. Out: a chat of plain
system, user and assistant turns, for templates that know nothing of tools. The wording is that of the Qwen and
Hermes templates, so that models trained on either meet what they know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

__all__ = ["CALL_BEGIN", "CALL_CLOSE", "CALL_OPEN", "spelled_out"]

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
CALL_BEGIN = f"{CALL_OPEN}\n"
"""How an assistant turn begins that is a tool call and nothing else."""

_BLOCK = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def spelled_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools stand at the end of the system turn, calls in their assistant turn, and results that follow each
    other in one user turn. A chat without any of these comes back as it is."""
    turns: list[dict[str, Any]] = []
    for results, group in groupby(messages, lambda message: message.get("role") == "tool"):
        if results:
            turns.append({"role": "user", "content": "\n".join(map(_result, group))})
        else:
            turns.extend(map(_with_calls, group))
    return _with_tools(turns, tools) if tools else turns


def _with_tools(turns: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    block = _BLOCK.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if turns and turns[0].get("role") == "system":
        return [turns[0] | {"content": f"{turns[0]['content']}\n\n{block}"}, *turns[1:]]
    return [{"role": "system", "content": block}, *turns]


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    turn = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if not calls:
        return turn
    said = [turn["content"]] if turn.get("content") else []
    return turn | {"content": "\n".join([*said, *map(_call, calls)])}


def _call(function: Mapping[str, Any]) -> str:
    body = {"name": function["name"], "arguments": function["arguments"]}
    return f"{CALL_OPEN}\n{json.dumps(body, ensure_ascii=False)}\n{CALL_CLOSE}"


def _result(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"
