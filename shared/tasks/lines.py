"""A tenant's own data, line by line: JSON objects and the chats in them.

Every complaint names the line, counted as an editor counts. Fields that are not asked for are ignored;
empty lines are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shared.tasks.chat import Messages

__all__ = ["json_kind", "json_lines", "messages_of"]

ROLES = ("system", "user", "assistant", "tool")


class _Twice(Exception):
    """A key stands twice in one object, so that one of its values would be lost."""


def json_lines(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object). Raises ValueError for an empty file too."""
    empty = True
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            line = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} is not UTF-8 (byte {error.start + 1} of the line)") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is not JSON: {error.msg} at column {error.colno}") from None
        except _Twice as error:
            raise ValueError(f"line {number} has the key {error} twice; keep one of the two") from None
        except RecursionError:
            raise ValueError(f"line {number} is nested too deeply") from None
        if not isinstance(line, dict):
            raise ValueError(f"line {number} must be a JSON object, found {json_kind(line)}")
        empty = False
        yield number, line
    if empty:
        raise ValueError("the file has no lines; send one JSON object a line")


def messages_of(number: int, field: str, value: Any, weights: bool = False) -> Messages:
    """A chat of at least one message; with `weights`, each may have a `weight`. Raises ValueError."""
    if not isinstance(value, list) or not value:
        shape = "a list of messages" if field == "messages" else "a text or a list of messages"
        raise ValueError(f"line {number}: `{field}` must be {shape} and not empty, found {json_kind(value)}")
    return tuple(_message(f"line {number}: `{field}[{at}]`", message, weights) for at, message in enumerate(value))


def json_kind(value: Any) -> str:
    """What a JSON value is, in words."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true or false"
        case str():
            return "a text" if value else "an empty text"
        case list():
            return "a list" if value else "an empty list"
        case dict():
            return "an object"
        case _:
            return "a number"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(repr(key[:100]))
        found[key] = value
    return found


def _message(where: str, message: Any, weights: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{where} must be an object with role and content, found {json_kind(message)}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"{where} has the role {str(role)[:80]!r}; allowed are {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"{where} needs a text as `content`, found {json_kind(content)}")
    if not weights or message.get("weight") is None:
        return {"role": role, "content": content}
    weight = message["weight"]
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(f"{where} has the weight {weight!r:.80}; a weight is 0 or 1")
    return {"role": role, "content": content, "weight": int(weight)}
