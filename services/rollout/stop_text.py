"""Stop strings over tokens: which token completes one.

In: tokens as they are drawn. Out: whether the text so far has a stop string. Invariants: a stop string is found at the
first token after which the text holds it, however it is spread over tokens; each token costs what the longest stop
string is long, not what it could be in tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shared.text import TextCodec

__all__ = ["StopText"]

_BYTES_A_CHARACTER = 4
_MARGIN = 8


class StopText:
    """`complete` once a stop string is; special tokens are text too."""

    def __init__(self, codec: TextCodec, stops: Sequence[str]) -> None:
        self._codec, self._stops = codec, tuple(stops)
        # the margin keeps what decoders do at the edge of a text out of the match
        self._wanted = max((len(stop) for stop in self._stops), default=0) + _MARGIN
        self._tail: deque[int] = deque()
        self._characters = 0
        self.complete = False

    def push(self, token: int) -> bool:
        """Whether this token completes one."""
        if self._stops and not self.complete:
            self._tail.append(token)
            self._characters += self._whole(token)
            self._shorten()
            text = self._codec.decode(self._tail, skip_special=False)
            self.complete = any(stop in text for stop in self._stops)
        return self.complete

    def _shorten(self) -> None:
        """Down to what surely has the characters of the longest stop string: a token has a byte at least."""
        while (
            len(self._tail) > self._wanted * _BYTES_A_CHARACTER
            or self._characters - self._whole(self._tail[0]) >= self._wanted
        ):
            self._characters -= self._whole(self._tail.popleft())

    def _whole(self, token: int) -> int:
        """Characters of the token by itself; of those that it shares with others, none."""
        text = self._codec.token_text(token)
        return len(text) - text.count("\ufffd")
