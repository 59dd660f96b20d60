"""Grammars that people send: those that cannot be compiled or computed, and hard ones that can."""

from __future__ import annotations

import json
from typing import Any

from shared.engine.port import Grammar


def _schema(**more: Any) -> Grammar:
    return Grammar("json_schema", json.dumps({"type": "object", **more}))


def _nested(depth: int) -> Grammar:
    return Grammar("json_schema", '{"properties":{"a":' * depth + "{}" + "}}" * depth)


REFUSED = {
    "a regex with a look-ahead": Grammar("regex", "(?=a)a"),
    "a regex with a back-reference": Grammar("regex", r"(a)\1"),
    "a regex that is none": Grammar("regex", "(a"),
    "a regex that repeats itself a million times": Grammar("regex", "((a{1000}){1000}){1000}"),
    "a regex that nests without end": Grammar("regex", "(" * 5000 + "a" + ")" * 5000),
    "a regex with a NUL": Grammar("regex", "a\x00b"),
    "a regex too long": Grammar("regex", "a" * 70_000),
    "a text that is no Unicode": Grammar("regex", "\ud800"),
    "a schema that is no JSON": Grammar("json_schema", "{"),
    "a schema that is no object": Grammar("json_schema", "[1]"),
    "a schema that nests without end": Grammar("json_schema", "[" * 60_000),
    "a schema too deep": _nested(40),
    "a schema too long": _schema(properties={"a": {"enum": [f"{i:08d}" for i in range(10_000)]}}),
    "a keyword that is not known": _schema(properties={"a": {"type": "string", "not": {"const": "b"}}}),
    "unique items": _schema(properties={"a": {"type": "array", "items": {}, "uniqueItems": True}}),
    "a reference to elsewhere": _schema(properties={"a": {"$ref": "https://example.com/schema.json"}}),
    "a reference to nothing": _schema(properties={"a": {"$ref": "#/$defs/none"}}),
    "a type that is none": _schema(properties={"a": {"type": "text"}}),
    "a schema that nothing fits": _schema(properties={"a": {"type": "integer", "enum": ["x"]}}, required=["a"]),
}  # fmt: skip
KEPT = {
    "a regex of many ways": Grammar("regex", "(a|a)*(a|b)*(a*)*(a+)+b"),
    "a regex that looks far back": Grammar("regex", "(.*a.{12}){2}"),
    "a large enumeration": _schema(properties={"a": {"enum": [f"{i:04d}" for i in range(4000)]}}, required=["a"]),
    "a recursion": _schema(properties={"a": {"$ref": "#"}}, additionalProperties=False),
    "many optional properties": _schema(properties={f"p{i}": {"type": "integer"} for i in range(200)}),
}
