"""A chat as clients send it: text turns, calls that the assistant made, and what came of them.

In: JSON. Out: messages as chat templates take them. Invariant: each result answers a call that stands before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import field_validator, model_validator

from services.gateway.openai.fields import Fields, StrictFields

__all__ = ["Message", "check_results"]


class TextPart(Fields):
    type: Literal["text"]
    text: str


class CalledFunction(StrictFields):
    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, text: str) -> str:
        try:
            if isinstance(json.loads(text), dict):
                return text
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
    has `tool_calls` may be without. A turn of role `tool` is the result of the call that `tool_call_id` names."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: tuple[CallMade, ...] = ()
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls belongs to the assistant, not to {self.role}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id belongs to role tool, which needs it")
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


def check_results(messages: Sequence[Message]) -> None:
    """Raises ValueError for a result of a call that nobody made before it."""
    made: set[str] = set()
    for number, message in enumerate(messages):
        made |= {call.id for call in message.tool_calls}
        if message.tool_call_id is not None and message.tool_call_id not in made:
            raise ValueError(
                f"turn {number} is the result of {message.tool_call_id!r}, which no assistant turn before it called"
            )
