"""Stop strings over tokens: which token completes one.

In: tokens as they are drawn. Out: whether the text so far has a stop string. Invariant: a stop string is found at the
first token after which the text holds it, however it is spread over tokens.
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
        # a token has a byte at least; the margin keeps what decoders do at the edge of a text out of the match
        longest = max((len(stop) for stop in self._stops), default=0)
        self._tail: deque[int] = deque(maxlen=longest * _BYTES_A_CHARACTER + _MARGIN)
        self.complete = False

    def push(self, token: int) -> bool:
        """Whether this token completes one."""
        if self._stops and not self.complete:
            self._tail.append(token)
            text = self._codec.decode(self._tail, skip_special=False)
            self.complete = any(stop in text for stop in self._stops)
        return self.complete
