"""A completion's text, read for tool calls: `<tool_call>`, one JSON object of `name` and `arguments`, `</tool_call>`.

In: the pieces of one choice. Out: pieces whose text is content alone, with the calls beside it. Rules: a call names
one of the request's tools and has an object of arguments, passed on as the model wrote it; whitespace before a call,
and behind the last, belongs to the call. Whatever else looks like one (no JSON, an unknown name, a tag that is never
closed) stays content, character for character: nothing is dropped, nothing is made up. Invariant: content and calls
depend on the text alone, never on how it was cut; no piece holds part of a tag that may still open a call. Of the
tokens those are passed on whose text begins in content.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from services.gateway.openai.choice import Piece, Token, ToolCall
from shared.text.tools import CALL_CLOSE, CALL_OPEN

__all__ = ["ForcedCall", "ToolText", "read_call"]

CALLED = "tool_calls"
"""The finish reason of a choice that ended by itself and has a call."""


# Outside of strings: the quote that opens one, the closing tag, or a character that no JSON has there.
_NEXT = re.compile(rf'"|{CALL_CLOSE}|[<\\]')
# Within a string: up to its closing quote, or as far as there is text (a backslash waits for what it escapes).
_STRING = re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL)
SPACE = " \t\n\r"
_SPACE = re.compile(f"[{SPACE}]*")
# What may be the beginning of a tag, longest first.
_OPENINGS = tuple(CALL_OPEN[:length] for length in range(len(CALL_OPEN) - 1, 0, -1))


def read_call(text: str, names: Iterable[str]) -> ToolCall | None:
    """The call that `text` is, whole; None for anything else."""
    try:
        members = _members(text)
        if members is None or members.keys() != {"name", "arguments"}:
            return None
        name, arguments = (json.loads(members[key], parse_constant=_no_constant) for key in ("name", "arguments"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return ToolCall(name, members["arguments"])


def _members(text: str) -> dict[str, str] | None:
    """The members of a JSON object, each value as it is written. Raises ValueError for what is no JSON."""
    decoder = json.JSONDecoder()
    found: dict[str, str] = {}
    at = _behind(text, 0, "{")
    while True:
        key, at = decoder.raw_decode(text, at)
        start = _behind(text, at, ":")
        _, end = decoder.raw_decode(text, start)
        if not isinstance(key, str) or key in found:
            return None
        found[key] = text[start:end]
        at = _space(text, end)
        if text[at : at + 1] != ",":
            return found if _behind(text, at, "}") == len(text) else None
        at = _behind(text, at, ",")


def _behind(text: str, at: int, sign: str) -> int:
    """Where what follows `sign` begins; whitespace on both sides is passed over."""
    at = _space(text, at)
    if text[at : at + 1] != sign:
        raise ValueError(f"{sign} expected")
    return _space(text, at + 1)


def _space(text: str, at: int) -> int:
    """The end of the whitespace that begins at `at`."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _may_open(text: str) -> int:
    """Where the end of a text begins that may yet turn out to belong to a call."""
    begun = next((begun for begun in _OPENINGS if text.endswith(begun)), "")
    return len(text.removesuffix(begun).rstrip(SPACE))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


class ForcedCall:
    """A completion that is one call's JSON and nothing else; cut before its end, it is content."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._text, self._tokens = "", list[Token]()

    def push(self, piece: Piece) -> Piece:
        self._text += piece.text
        self._tokens += piece.tokens
        if piece.finish_reason is None:
            return Piece("")
        call = read_call(self._text, self._names)
        if call is None:
            return Piece(self._text, tuple(self._tokens), piece.finish_reason)
        return Piece("", (), CALLED, (call,))


@dataclass
class _Decided:
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


class ToolText:
    """Free text with calls in it. `single` ends the choice behind its first call."""

    def __init__(self, names: frozenset[str], single: bool) -> None:
        self._names, self._single = names, single
        self._held, self._at = "", 0  # what is not decided yet, and where it begins in the choice's text
        # There is no end of a call in what is held up to `_searched`, which may be within a string of its JSON.
        self._searched, self._quoted = 0, False
        self._tokens: deque[Token] = deque()
        self._called = self._behind_call = False

    def push(self, piece: Piece) -> Piece:
        self._held += piece.text
        self._tokens.extend(piece.tokens)
        now = _Decided()
        ended = piece.finish_reason is not None
        while self._decide(now, ended):
            if now.calls and self._single:
                return Piece(now.text, tuple(now.tokens), CALLED, tuple(now.calls))
        if ended and not self._behind_call:
            now.tokens += self._tokens
        finish = CALLED if self._called and piece.finish_reason == "stop" else piece.finish_reason
        return Piece(now.text, tuple(now.tokens), finish, tuple(now.calls))

    def _decide(self, now: _Decided, ended: bool) -> bool:
        """One step from the head of what is held; whether another may follow."""
        opened = self._held.find(CALL_OPEN)
        if opened < 0:
            if ended and self._behind_call and not self._held.strip(SPACE):
                self._pass(len(self._held), None)
            self._content(now, len(self._held) if ended else _may_open(self._held))
            return False
        self._content(now, len(self._held[:opened].rstrip(SPACE)))
        inside = self._held.index(CALL_OPEN) + len(CALL_OPEN)
        close = self._close(inside)
        if close is None and not ended:
            return False
        call = read_call(self._held[inside:close], self._names) if close else None
        if call is None or close is None:
            self._content(now, inside)
            return True
        self._pass(close + len(CALL_CLOSE), None)
        now.calls.append(call)
        self._called = self._behind_call = True
        return True

    def _close(self, inside: int) -> int | None:
        """Where the closing tag begins, 0 where there can be none, None where that is open still. A tag within a
        string of the JSON closes nothing."""
        self._searched = max(self._searched, inside)
        while not self._quoted or self._past_string():
            found = _NEXT.search(self._held, self._searched)
            if found is None:
                self._searched = len(self._held)
                return None
            self._searched = found.start()
            if found.group() == CALL_CLOSE:
                return found.start()
            if found.group() != '"':
                return None if CALL_CLOSE.startswith(self._held[found.start() :]) else 0
            self._searched, self._quoted = found.end(), True
        return None

    def _past_string(self) -> bool:
        """Reads on within a string; whether it is closed."""
        found = _STRING.match(self._held, self._searched)
        self._searched = found.end() if found else self._searched
        if self._held[self._searched : self._searched + 1] != '"':
            return False
        self._searched, self._quoted = self._searched + 1, False
        return True

    def _content(self, now: _Decided, length: int) -> None:
        if length:
            now.text += self._held[:length]
            self._behind_call = False
            self._pass(length, now.tokens)

    def _pass(self, length: int, keep: list[Token] | None) -> None:
        self._at += length
        self._held = self._held[length:]
        self._searched, self._quoted = 0, False
        while self._tokens and self._tokens[0].offset < self._at:
            token = self._tokens.popleft()
            if keep is not None:
                keep.append(token)
