"""A chat as clients send it: text turns, calls that the assistant made, and what came of them.

In: JSON. Out: messages as chat templates take them. Invariant: each result answers a call that stands before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field, field_validator, model_validator

from services.gateway.openai.fields import Fields, StrictFields

__all__ = ["MAX_MESSAGES", "Message", "Messages", "check_results", "unknown_keys"]

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_CALLS = 128


class TextPart(StrictFields):
    type: Literal["text"]
    text: str


class CalledFunction(StrictFields):
    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, text: str) -> str:
        """Clients send the arguments of a call without any as an empty text too."""
        try:
            if isinstance(found := json.loads(text or "{}", parse_constant=_no_constant), dict):
                json.dumps(found, allow_nan=False)  # 1e999 is read as infinity
                return text or "{}"
        except (ValueError, RecursionError):
            pass
        raise ValueError("the text of a JSON object is expected")


class CallMade(StrictFields):
    """`index` is what streamed calls carry; it changes nothing."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def as_template_input(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Fields):
    """`developer` is `system` by its newer name. Content is text, or parts of type text; an assistant turn that
    has `tool_calls` may be without. A turn of role `tool` is the result of the call that `tool_call_id` names, and
    its `name` is that of the called function; no other turn has a name, since no template would show it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[tuple[CallMade, ...], Field(max_length=MAX_CALLS, fail_fast=True)] = ()
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls belongs to the assistant, not to {self.role}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id belongs to role tool, which needs it")
        if self.name is not None and self.role != "tool":
            raise ValueError(f"name is not supported in a turn of {self.role}; write it into the content")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is required; only an assistant turn with tool_calls may be without")
        return self

    def as_template_input(self) -> dict[str, Any]:
        parts = self.content or ""
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            turn["tool_calls"] = [call.as_template_input() for call in self.tool_calls]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def unknown_keys(messages: Sequence[Message]) -> list[str]:
    """Every key of a message that would be ignored, by its place. Empty lists change nothing."""
    extra = ((number, message.model_extra or {}) for number, message in enumerate(messages))
    return [f"messages.{number}.{key}" for number, keys in extra for key, value in keys.items() if value != []]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def check_results(messages: Sequence[Message]) -> None:
    """Raises ValueError for a result of a call that nobody made before it."""
    made: set[str] = set()
    for number, message in enumerate(messages):
        made |= {call.id for call in message.tool_calls}
        if message.tool_call_id is not None and message.tool_call_id not in made:
            raise ValueError(
                f"turn {number} is the result of {message.tool_call_id!r}, which no assistant turn before it called"
            )
