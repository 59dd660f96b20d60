"""A tenant's own data, line by line: chats to learn from, prompts with answers.

Every complaint names the line. Fields that are not asked for are ignored; empty lines are skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from shared.tasks.taskset import Chat, TaskItem

__all__ = ["is_held_out", "parse_messages_jsonl", "parse_prompts_jsonl"]

ROLES = ("system", "user", "assistant", "tool")


def parse_messages_jsonl(data: bytes) -> list[Chat]:
    """`{"messages": [{"role", "content"}, …]}` a line. Raises ValueError naming the first bad line."""
    chats = []
    for number, line in _objects(data):
        chat = _chat(number, "messages", line.get("messages"))
        if not any(message["role"] == "assistant" for message in chat):
            raise ValueError(f"line {number}: no message has the role assistant, so there is nothing to learn from")
        chats.append(chat)
    return chats


def parse_prompts_jsonl(data: bytes) -> list[TaskItem]:
    """`{"prompt": text or [{"role", "content"}, …], "answer": text}` a line; the item's id is `line-N`.
    Raises ValueError naming the first bad line."""
    items = []
    for number, line in _objects(data):
        prompt, answer = line.get("prompt"), line.get("answer")
        if isinstance(prompt, str) and prompt:
            chat: Chat = ({"role": "user", "content": prompt},)
        else:
            chat = _chat(number, "prompt", prompt)
        if chat[-1]["role"] == "assistant":
            raise ValueError(f"line {number}: the prompt ends with the assistant; its turn is what is sampled")
        if not isinstance(answer, str):
            raise ValueError(f"line {number}: `answer` must be a text, found {_kind(answer)}")
        items.append(TaskItem(f"line-{number}", chat, answer))
    return items


def is_held_out(item: TaskItem, share: float) -> bool:
    """By hash of the prompt alone, so that copies of a prompt fall on the same side in any file."""
    prompt = json.dumps(item.messages, sort_keys=True, separators=(",", ":"))
    return int(hashlib.sha256(prompt.encode()).hexdigest()[:12], 16) < share * 16**12


def _objects(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object). Raises ValueError for an empty file too."""
    empty = True
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            line = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} is not UTF-8 (byte {error.start + 1} of the line)") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is not JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise ValueError(f"line {number} is nested too deeply") from None
        if not isinstance(line, dict):
            raise ValueError(f"line {number} must be a JSON object, found {_kind(line)}")
        empty = False
        yield number, line
    if empty:
        raise ValueError("the file has no lines; send one JSON object a line")


def _chat(number: int, field: str, value: Any) -> Chat:
    if not isinstance(value, list) or not value:
        shape = "a list of messages" if field == "messages" else "a text or a list of messages"
        raise ValueError(f"line {number}: `{field}` must be {shape} and not empty, found {_kind(value)}")
    return tuple(_message(number, field, position, message) for position, message in enumerate(value))


def _message(number: int, field: str, position: int, message: Any) -> dict[str, str]:
    where = f"line {number}: `{field}[{position}]`"
    if not isinstance(message, dict):
        raise ValueError(f"{where} must be an object with role and content, found {_kind(message)}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"{where} has the role {role!r}; allowed are {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"{where} needs a text as `content`, found {_kind(content)}")
    return {"role": role, "content": content}


def _kind(value: Any) -> str:
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
