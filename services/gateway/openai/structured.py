"""Structured output: which grammar a request's completion must follow.

In: `response_format`, as OpenAI has it, or `structured_outputs`, as vLLM has it. Out: a `Grammar`, or none.
Invariant: what reaches an engine is a valid schema or pattern within bounds (`schemas.py`, `patterns.py`).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.errors import BadField
from services.gateway.openai.fields import StrictFields
from services.gateway.openai.patterns import check_pattern
from services.gateway.openai.schemas import MAX_PLACES, check_schema
from shared.engine.port import Grammar

__all__ = ["ResponseFormat", "StructuredOutputs", "grammar_of", "json_grammar"]


class TextFormat(StrictFields):
    type: Literal["text"]


class JsonObjectFormat(StrictFields):
    type: Literal["json_object"]


class NamedSchema(StrictFields):
    """The schema is held to whatever `strict` says; `name` and `description` change nothing."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(StrictFields):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(StrictFields):
    """One of: a pattern that the whole completion matches, or a JSON Schema, as an object or as its text."""

    regex: str | None = None
    json_schema: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None


def grammar_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> Grammar | None:
    """Raises BadField naming the field, what is wrong and the bound."""
    asked = None if isinstance(response_format, TextFormat) else response_format
    if structured is None:
        if asked is None:
            return None
        if isinstance(asked, JsonObjectFormat):
            return json_grammar({"type": "object"}, "response_format")
        return json_grammar(asked.json_schema.json_schema, "response_format", ".json_schema.schema")
    if asked is not None:
        raise BadField("structured_outputs", "response_format and structured_outputs were both sent; leave one out")
    if (structured.regex is None) == (structured.json_schema is None):
        raise BadField("structured_outputs", "structured_outputs takes exactly one of regex and json")
    if structured.json_schema is not None:
        return json_grammar(_object(structured.json_schema), "structured_outputs", ".json")
    return _regex_grammar(structured.regex or "")


def json_grammar(schema: dict[str, Any], param: str, place: str = "", most: int = MAX_PLACES) -> Grammar:
    """Raises BadField for a schema that `check_schema` refuses."""
    try:
        return Grammar("json_schema", check_schema(schema, most))
    except ValueError as error:
        raise BadField(param, f"{param}{place}: {error}") from error


def _regex_grammar(pattern: str) -> Grammar:
    try:
        check_pattern(pattern)
    except ValueError as error:
        raise BadField("structured_outputs", f"structured_outputs.regex: {error}") from error
    return Grammar("regex", pattern)


def _object(schema: dict[str, Any] | str) -> dict[str, Any]:
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise BadField("structured_outputs", f"structured_outputs.json: it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadField("structured_outputs", "structured_outputs.json: a schema is a JSON object")
    return found
