"""Does a change of the contracts break somebody? Compares the JSON Schemas with a committed baseline.

What others publish to us (`consumed`) must go on being accepted: new optional fields, union members and
enum values are fine; removals, new required fields and narrower bounds are breaks. What we publish must
go on being readable: new fields, members and values are fine; removed or retyped fields are breaks.

`python schemas/compat.py` ends with 1 and the breaks on stderr; `--accept` makes the present the
baseline, and refuses while there is a break (that is a `v2` beside `v1`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from mint_schemas import CONTRACTS

__all__ = ["breaks", "main"]

HERE = Path(__file__).parent
BASELINE, CURRENT = HERE / "baseline", HERE / "jsonschema"

Direction = Literal["consumed", "published"]
Schema = dict[str, Any]

_LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems")
_UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")
_WIDER = {"integer": "number"}


def breaks(old: Schema, new: Schema, direction: Direction) -> list[str]:
    """Every break between two JSON Schemas of one type, in words; empty = compatible."""
    return list(_Comparison(old, new, direction).compare("body", old, new))


class _Comparison:
    def __init__(self, old_root: Schema, new_root: Schema, direction: Direction) -> None:
        self._old_root, self._new_root = old_root, new_root
        self._consumed = direction == "consumed"
        self._seen: set[tuple[str, str]] = set()

    def compare(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        if "$ref" in old and "$ref" in new:
            pair = (old["$ref"], new["$ref"])
            if pair in self._seen:
                return
            self._seen.add(pair)
        olds, news = _variants(old, self._old_root), _variants(new, self._new_root)
        if not self._consumed and "null" in news and "null" not in olds:
            yield f"{where}: may now be null"
        for kind, was in olds.items():
            now = news.get(kind) or news.get(_WIDER.get(kind, "") if self._consumed else "")
            if now is None:
                if self._consumed or not _tagged(kind):
                    yield f"{where}: {kind} was removed, now {' or '.join(news)}"
                continue
            yield from self._same_kind(where if len(olds) == 1 else f"{where}[{kind}]", was, now)

    def _same_kind(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        yield from self._fields(where, old, new)
        if "items" in old and isinstance(new.get("items"), dict):
            yield from self.compare(f"{where}[]", old["items"], new["items"])
        if isinstance(old.get("additionalProperties"), dict) and isinstance(new.get("additionalProperties"), dict):
            yield from self.compare(f"{where}{{}}", old["additionalProperties"], new["additionalProperties"])
        if self._consumed:
            yield from _narrowed(where, old, new)

    def _fields(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        was, now = old.get("properties", {}), new.get("properties", {})
        required_was, required_now = set(old.get("required", ())), set(new.get("required", ()))
        for name in was:
            if name not in now:
                yield f"{where}.{name}: the field was removed"
            else:
                yield from self.compare(f"{where}.{name}", was[name], now[name])
        if self._consumed:
            for name in sorted(required_now - required_was):
                yield f"{where}.{name}: is required now"
        else:
            for name in sorted((required_was - required_now) & set(now)):
                yield f"{where}.{name}: may be absent now"


def _resolve(schema: Schema, root: Schema) -> Schema:
    while "$ref" in schema:
        target: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        schema = target
    return schema


def _variants(schema: Schema, root: Schema) -> dict[str, Schema]:
    """The alternatives of a schema, by what tells them apart: their tag, else their type."""
    schema = _resolve(schema, root)
    members = schema.get("anyOf") or schema.get("oneOf")
    if members:
        return {kind: member for each in members for kind, member in _variants(each, root).items()}
    types = schema.get("type", "any")
    if isinstance(types, list):
        return {kind: {**schema, "type": kind} for kind in types}
    tag = schema.get("properties", {}).get("kind", {}).get("const")
    return {f"kind={tag}" if tag is not None else types: schema}


def _tagged(kind: str) -> bool:
    return kind.startswith("kind=")


def _narrowed(where: str, old: Schema, new: Schema) -> Iterator[str]:
    was, now = _values(old), _values(new)
    if now is not None and was is None:
        yield f"{where}: only {sorted(now)} are accepted now"
    elif now is not None and was is not None and was - now:
        yield f"{where}: {sorted(was - now)} are no longer accepted"
    for bound in _LOWER:
        if bound in new and (bound not in old or new[bound] > old[bound]):
            yield f"{where}: {bound} is {new[bound]} now, was {old.get(bound, 'open')}"
    for bound in _UPPER:
        if bound in new and (bound not in old or new[bound] < old[bound]):
            yield f"{where}: {bound} is {new[bound]} now, was {old.get(bound, 'open')}"
    if "pattern" in new and new["pattern"] != old.get("pattern"):
        yield f"{where}: the pattern is {new['pattern']!r} now, was {old.get('pattern', 'open')!r}"
    if (
        new.get("additionalProperties") is False
        and old.get("additionalProperties") is not False
        and "properties" in old
    ):
        yield f"{where}: unknown fields are refused now"


def _values(schema: Schema) -> set[str] | None:
    if "const" in schema:
        return {json.dumps(schema["const"])}
    return {json.dumps(value) for value in schema["enum"]} if "enum" in schema else None


def check(baseline: Path = BASELINE, current: Path = CURRENT) -> list[str]:
    """The breaks of every contract of the baseline. A type that is new has none."""
    directions = {contract.type: contract.direction for contract in CONTRACTS}
    found = []
    for path in sorted(baseline.glob("*.json")):
        type_ = path.name.removesuffix(".json")
        if type_ not in directions or not (current / path.name).exists():
            found.append(f"{type_}: the contract was removed")
            continue
        old, new = json.loads(path.read_text()), json.loads((current / path.name).read_text())
        found += [f"{type_}: {problem}" for problem in breaks(old, new, directions[type_])]
    return found


def main(arguments: list[str]) -> int:
    problems = check()
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    if problems:
        sys.stderr.write("a break is a v2 beside v1: keep the old type and add a new one\n")
        return 1
    if "--accept" in arguments:
        BASELINE.mkdir(exist_ok=True)
        for path in CURRENT.glob("*.json"):
            (BASELINE / path.name).write_text(path.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
