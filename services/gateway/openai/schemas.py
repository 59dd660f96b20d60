"""JSON Schemas that a completion must fit: valid, of bounded size, and whole in themselves.

In: a caller's schema. Out: nothing, or ValueError in words. Invariant: what passes refers to nothing outside
itself, and no reference leads back to itself without a property or an item in between, so that an engine's
grammar of it ends.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.openai.patterns import MAX_POSITIONS, check_pattern

__all__ = ["MAX_DEPTH", "MAX_PLACES", "MAX_PROPERTIES", "MAX_SCHEMA_BYTES", "check_schema", "moved", "places"]

MAX_SCHEMA_BYTES = 65_536
MAX_DEPTH = 32
MAX_PROPERTIES = 1000
MAX_PLACES = 2000
"""Objects and items of lists: the library compares some lists' items each with each."""

_ELSEWHERE = frozenset({"$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef"})
_VALUES = frozenset({"const", "enum", "default", "examples"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_COUNTS = ("maxItems", "minItems", "maxProperties", "minProperties", "maxLength", "minLength")
_SAME_PLACE = ("allOf", "anyOf", "oneOf")
# By name, since the library has no types, and type checkers take schemas/jsonschema for it.
_library: Any = importlib.import_module("jsonschema")
# Patterns are checked here, by size; the library would compile them.
_NO_FORMATS = _library.FormatChecker(formats=())


def check_schema(schema: Mapping[str, Any], most: int = MAX_PLACES) -> str:
    """The schema as JSON text. Raises ValueError saying what is wrong and what the bound is; `most` is that of
    `places`."""
    try:
        return _checked(schema, most)
    except RecursionError:
        raise ValueError(f"the schema is nested more than {MAX_DEPTH} deep, or its references are") from None


def places(schema: Any) -> int:
    """How many objects and items of lists there are in a schema that `check_schema` let pass."""
    if isinstance(schema, dict):
        return 1 + sum(map(places, schema.values()))
    return sum(max(1, places(item)) for item in schema) if isinstance(schema, list) else 0


def _checked(schema: Mapping[str, Any], most: int) -> str:
    text = json.dumps(schema, allow_nan=False)
    if len(text) > MAX_SCHEMA_BYTES:
        raise ValueError(f"the schema has {len(text)} bytes as JSON; at most {MAX_SCHEMA_BYTES} are allowed")
    if _levels(schema) > MAX_DEPTH:
        raise ValueError(f"the schema is nested more than {MAX_DEPTH} deep")
    _Walk().check(schema, 1)
    if (found := places(schema)) > most:
        whole = f" of {MAX_PLACES} for all tools together" if most < MAX_PLACES else ""
        raise ValueError(f"the schema has {found} objects and items of lists; at most {most}{whole} are allowed")
    for reference in _references(schema):
        _follow(schema, reference)
    if not isinstance(schema.get("$schema", ""), str):
        raise ValueError("$schema is the address of a draft of JSON Schema, as text")
    validator = _library.validators.validator_for(schema, default=_library.Draft202012Validator)
    try:
        validator.check_schema(schema, format_checker=_NO_FORMATS)
    except _library.SchemaError as error:
        # Names in a schema may hold what no answer can: halves of characters.
        words = f"{error.json_path}: {error.message}"[:300].encode(errors="backslashreplace").decode()
        raise ValueError(f"it is no JSON Schema: {words}") from error
    _refuse_circles(schema)
    return text


def moved(schema: Any, under: str, keywords: bool = True) -> Any:
    """The schema as it stands at the JSON pointer `under` of another: its own references lead there too."""
    if isinstance(schema, list):
        return [moved(item, under) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if not keywords:
        return {name: moved(value, under) for name, value in schema.items()}
    found = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            found[key] = f"#{under}{value[1:]}"
        elif not (key in ("$schema", "$id") and isinstance(value, str)):
            found[key] = value if key in _VALUES else moved(value, under, key not in _NAMED)
    return found


@dataclass
class _Walk:
    """`times` is how often a place may be repeated by the places around it."""

    properties: int = 0

    def check(self, node: Any, times: int) -> None:
        if not isinstance(node, dict):
            return
        if isinstance(node.get("properties"), dict):
            self.properties += len(node["properties"])
        if self.properties > MAX_PROPERTIES:
            raise ValueError(f"the schema has more than {MAX_PROPERTIES} properties")
        counts = [node[key] for key in _COUNTS if type(node.get(key)) in (int, float)]
        times = int(min(times * max([1, *counts]), 1 << 62))
        if times > MAX_POSITIONS:
            raise ValueError(f"its lengths and counts multiply to {times}; at most {MAX_POSITIONS} are allowed")
        for key, value in node.items():
            self._keyword(key, value)
        for child in _children(node):
            self.check(child, times)

    def _keyword(self, key: str, value: Any) -> None:
        if isinstance(value, str) and key in _ELSEWHERE:
            raise ValueError(f"{key} is not supported; refer to a place within the schema, such as #/$defs/name")
        if isinstance(value, str) and key == "pattern":
            check_pattern(value)
        if isinstance(value, dict) and key == "patternProperties":
            for pattern in value:
                check_pattern(pattern)


def _levels(value: Any) -> int:
    """How deep its objects and lists are nested; plain values have none."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_levels, inner), default=0)


def _children(node: dict[str, Any]) -> Iterator[Any]:
    """What may be a schema within a schema: all but plain values. What has names of its own is no keyword there."""
    for key, value in node.items():
        if key in _VALUES:
            continue
        if isinstance(value, list):
            yield from value
        elif isinstance(value, dict) and key in _NAMED:
            yield from value.values()
        else:
            yield value


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for child in _children(node):
            yield from _references(child)


def _follow(schema: Any, reference: str) -> Any:
    """What stands at `reference`. Raises ValueError for one that leads elsewhere, or nowhere."""
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError(f"$ref {reference[:80]!r} leads out of the schema; only #/… is followed, never an address")
    place, before = schema, ""
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if name in _VALUES and before not in _NAMED:
            raise ValueError(f"$ref {reference[:80]!r} leads into {name}, which holds values, not schemas")
        before = name
        if isinstance(place, dict) and name in place:
            place = place[name]
        elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        else:
            raise ValueError(f"$ref {reference[:80]!r} leads to nothing: there is no {name[:80]!r}")
    return place


def _refuse_circles(schema: Any) -> None:
    """Raises ValueError where references lead round to a place with nothing in between."""
    done: set[int] = set()

    def visit(node: Any, above: frozenset[int]) -> None:
        if not isinstance(node, dict) or id(node) in done:
            return
        if id(node) in above:
            raise ValueError("a $ref leads back to itself with no property or item in between")
        for other in _same_place(schema, node):
            visit(other, above | {id(node)})
        done.add(id(node))

    for start in [schema, *(_follow(schema, reference) for reference in _references(schema))]:
        visit(start, frozenset())


def _same_place(schema: Any, node: dict[str, Any]) -> Iterator[Any]:
    """The schemas that the very value of `node` must fit as well."""
    if isinstance(node.get("$ref"), str):
        yield _follow(schema, node["$ref"])
    for key in _SAME_PLACE:
        # A place that only a reference leads to was never checked as a schema.
        if isinstance(others := node.get(key), list):
            yield from others
