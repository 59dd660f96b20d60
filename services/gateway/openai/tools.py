"""Tools in a request: what may be called, what must be, and how that is put to the engine.

In: `tools`, `tool_choice`, `parallel_tool_calls`. Out: a `ToolUse`, or none. A call that is asked for (`required`,
or a function by name) cannot fail: the assistant's turn begins with the opening tag, which stands in the prompt,
and what follows is one JSON object under a grammar, so that `required` is one call. With `auto` the completion is
free text, read by `calls.py`. Invariant: every name that is called is one of the request's tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.errors import BadField
from services.gateway.openai.fields import StrictFields
from services.gateway.openai.schemas import MAX_PLACES, check_schema, moved, places
from services.gateway.openai.structured import json_grammar
from shared.engine.port import Grammar

__all__ = ["MAX_TOOLS", "NamedChoice", "Tool", "ToolChoice", "ToolUse", "tool_use"]

MAX_TOOLS = 128
_CALL_PLACES = 8
"""Of a schema that stands around one tool's parameters."""

ToolName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Function(StrictFields):
    """`parameters`: a JSON Schema of type object; none, or an empty one, is no arguments. `strict` holds
    for a call that is asked for; what the model calls by itself may miss the schema, with it as without."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        return self.parameters or {"type": "object", "properties": {}}


class Tool(StrictFields):
    type: Literal["function"]
    function: Function


class ChosenFunction(StrictFields):
    name: ToolName


class NamedChoice(StrictFields):
    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(frozen=True)
class ToolUse:
    """`shown` is what the chat template gets. `forced` is the grammar of the one call that the completion is;
    without it the completion is read for calls, and ends behind the first where `parallel` is false."""

    shown: tuple[dict[str, Any], ...]
    names: frozenset[str]
    parallel: bool = True
    forced: Grammar | None = None


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool) -> ToolUse | None:
    """None where no tool may be called. Raises BadField naming the field and what is wrong."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadField("tool_choice", "tool_choice asks for a call, and tools lists none")
        return None
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadField("tools", f"tools has {twice!r} more than once; each name must be its own")
    left = MAX_PLACES
    for number, tool in enumerate(tools):
        left -= _check_parameters(number, tool.function, left)
    if choice == "none":
        return None
    shown = tuple(_shown(tool.function) for tool in tools)
    return ToolUse(shown, frozenset(names), parallel, _forced(tools, choice))


def _check_parameters(number: int, function: Function, left: int) -> int:
    """How many of the places that are `left` to it and the tools behind it the function takes."""
    try:
        if function.arguments.get("type") != "object":
            raise ValueError('a function\'s parameters are a schema of "type": "object"')
        check_schema(function.arguments, left)
        return places(function.arguments)
    except ValueError as error:
        raise BadField("tools", f"tools.{number}.function.parameters ({function.name}): {error}") from error


def _shown(function: Function) -> dict[str, Any]:
    described = {} if function.description is None else {"description": function.description}
    shown = {"name": function.name, **described, "parameters": function.arguments}
    return {"type": "function", "function": json.loads(json.dumps(shown))}


def _forced(tools: Sequence[Tool], choice: ToolChoice | None) -> Grammar | None:
    if choice is None or choice == "auto":
        return None
    if isinstance(choice, NamedChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise BadField("tool_choice", f"tool_choice names {choice.function.name!r}, which tools does not list")
    calls = [_call(tool.function.name) for tool in tools]
    # Engines follow references through objects alone: what they lead to stands under names, not in a list.
    defined = {tool.function.name: _arguments(tool.function) for tool in tools}
    most = MAX_PLACES + 1 + _CALL_PLACES * len(tools)
    return json_grammar({**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": defined}, "tools", most=most)


def _call(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _arguments(function: Function) -> Any:
    return moved(function.arguments, f"/$defs/{function.name}")
