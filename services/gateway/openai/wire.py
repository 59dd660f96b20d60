"""What OpenAI clients may send: the fields that are honoured, with their bounds.

In: JSON. Out: frozen request models. A field sent as null counts as not sent; a field that would change
nothing (`tools: []`, `store: false`) or only labels the request (`user`) passes. Invariant: whatever
would change the answer and is not honoured is refused by name, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from services.gateway.errors import BadField
from services.gateway.openai.fields import MAX_TOKENS, Fields, Integer, Number
from services.gateway.openai.messages import Message, Messages, check_results, unknown_keys
from services.gateway.openai.structured import ResponseFormat, StructuredOutputs
from services.gateway.openai.tools import MAX_TOOLS, Tool, ToolChoice
from shared.engine.requests import MIN_TEMPERATURE
from shared.sampling.port import BACKGROUND, INTERACTIVE

__all__ = ["ChatRequest", "CompletionRequest", "Message", "SamplingFields", "refuse_unsupported"]

MAX_STOPS, MAX_STOP_CHARACTERS = 4, 256
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_PROMPTS = 4096
MAX_NAMED = 20
"""Unsupported fields that an answer names."""

_LABELS = frozenset({"user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata"})
_CHANGES_NOTHING: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "best_of": (1,),
}
_SAID_ELSEWHERE = {
    **dict.fromkeys(("guided_json", "guided_regex"), 'write it as structured_outputs: {"json": …} or {"regex": …}'),
    **dict.fromkeys(("functions", "function_call"), "write it as tools and tool_choice"),
}

Penalty = Annotated[Number, Field(ge=-2, le=2)]
Bias = Annotated[Number, Field(ge=-100, le=100)]


Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]


class StreamOptions(Fields):
    include_usage: bool = False


class SamplingFields(Fields):
    """What both endpoints share. `stop`: at most 4 strings of 256 characters, not part of the answer. `priority`: 0 for
    somebody who waits to 10 for work that nobody watches; lower runs earlier. Of `response_format` and
    `structured_outputs` one may be sent."""

    model: Annotated[str, Field(min_length=1, max_length=400)]
    n: Annotated[Integer, Field(ge=1, le=128)] = 1
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: tuple[str, ...] = ()
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Integer, Field(ge=-1, lt=2**31)] = -1
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[int, Bias] = Field(default_factory=dict)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[Integer, Field(ge=INTERACTIVE, le=BACKGROUND)] = INTERACTIVE
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError("a string, or a list of strings, none of them empty")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed, {len(stops)} were sent")
        longest = max(map(len, stops), default=0)
        if longest > MAX_STOP_CHARACTERS:
            raise ValueError(f"a stop string has {longest} characters; at most {MAX_STOP_CHARACTERS} are allowed")
        return tuple(stops)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:
            raise ValueError(f"{len(value)} tokens have a bias; at most {MAX_BIASES} may")
        return value

    @field_validator("temperature")
    @classmethod
    def _temperature(cls, value: float) -> float:
        if 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"0 (greedy) or at least {MIN_TEMPERATURE}")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(SamplingFields):
    messages: Messages
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[tuple[Tool, ...], Field(max_length=MAX_TOOLS, fail_fast=True)] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True

    @field_validator("messages")
    @classmethod
    def _results(cls, messages: list[Message]) -> list[Message]:
        check_results(messages)
        return messages

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(SamplingFields):
    """`prompt`: text, token ids, or a list of either. `max_tokens` 0 needs `echo`."""

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: Annotated[Integer, Field(ge=0)] = 16
    echo: bool = False
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt(cls, value: Any) -> Any:
        rows = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
        _check_size(value, rows)
        if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(v, str) for v in value)):
            return value
        if all(isinstance(row, list) and row and all(type(token) is int for token in row) for row in rows):
            return value
        raise ValueError("text, a list of token ids, a list of texts or a list of lists of token ids; not empty")

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


def _check_size(value: Any, rows: list[Any]) -> None:
    many = isinstance(value, list) and bool(value) and isinstance(value[0], list | str)
    if many and len(value) > MAX_PROMPTS:
        raise ValueError(f"{len(value)} prompts were sent; at most {MAX_PROMPTS} are allowed")
    tokens = sum(len(row) for row in rows if isinstance(row, list))
    if tokens > MAX_TOKENS:
        raise ValueError(f"{tokens} token ids were sent; at most {MAX_TOKENS} are allowed")


def refuse_unsupported(body: SamplingFields) -> None:
    """Raises BadField naming every field that was sent and would be ignored."""
    sent = {key: value for key, value in (body.model_extra or {}).items() if key not in _LABELS}
    missing = [key for key, value in sent.items() if not _changes_nothing(key, value)]
    if isinstance(body, ChatRequest):
        missing += unknown_keys(body.messages)
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.limit:
            raise BadField("max_tokens", "max_tokens and max_completion_tokens differ; send one of them")
    if body.stream_options is not None:
        missing += [f"stream_options.{key}" for key in body.stream_options.model_extra or {}]
    if missing:
        have = ", ".join(sorted(type(body).model_fields))
        names = ", ".join([name[:80] for name in missing[:MAX_NAMED]] + ["…"] * (len(missing) > MAX_NAMED))
        hint = next((_SAID_ELSEWHERE[name] for name in missing if name in _SAID_ELSEWHERE), "leave it out")
        words = f"not supported here: {names}; {hint}. Supported: {have}"
        raise BadField(missing[0][:80], words, "unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        raise BadField("stream_options", "stream_options needs stream: true")


def _changes_nothing(key: str, value: Any) -> bool:
    """By type too: True is 1, and `best_of: true` is none of OpenAI's."""
    return any(type(value) is type(same) and value == same for same in _CHANGES_NOTHING.get(key, ()))
