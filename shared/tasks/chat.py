"""Chats as tasks and training data hold them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["Chat", "Messages"]

Messages = tuple[dict[str, Any], ...]
"""Messages with `role` and `content`, in order; in a demonstration one may have a `weight` of 0 or 1."""


class Chat(tuple[dict[str, Any], ...]):
    """A demonstration: `Messages` that know where they came from, `line-12` of a file or an item's id.

    Equal to any tuple of the same messages; the name is for people."""

    name: str

    def __new__(cls, messages: Iterable[dict[str, Any]] = (), name: str = "") -> Chat:
        chat = super().__new__(cls, messages)
        chat.name = name
        return chat
