"""One choice's tokens become its text: detokenised, cut at stop strings, each token with its place.

In: chunks of one sampled sequence. Out: pieces that may be sent. Invariant: the pieces depend on the
tokens alone, never on how they came in chunks; no piece ends inside a character or holds part of a
stop string; tokens are passed on with the text that they begin in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shared.engine.port import SampleChunk
from shared.text.codec import Detokenizer, TextCodec
from shared.text.stops import StopStrings

__all__ = ["ChoiceText", "Piece", "Token", "ToolCall", "prompt_piece", "token_by_token"]


@dataclass(frozen=True)
class Token:
    """`offset` is where its text begins in the choice's text, in characters. `logprob` None: not asked
    for, or the first token of a prompt."""

    id: int
    offset: int
    logprob: float | None = None
    top: dict[int, float] | None = None


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is a JSON object as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Piece:
    text: str
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None
    calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.finish_reason or self.calls)


class ChoiceText:
    """What follows `prompt`; `offset` is the length of an echo of it. `generated` counts every token, the stop
    token too."""

    def __init__(self, codec: TextCodec, stops: Sequence[str], prompt: Sequence[int] = (), offset: int = 0) -> None:
        self._eos = frozenset(codec.eos_ids)
        self._detokenizer = Detokenizer(codec, after=prompt)
        self._stops = StopStrings(stops)
        self._seen = self._sent = offset
        self._waiting: deque[Token] = deque()
        self.generated = 0

    def push(self, chunk: SampleChunk) -> Piece:
        """Once a piece has a finish reason, the choice is over, whatever the engine would still say."""
        texts = []
        for position, token in enumerate(chunk.token_ids):
            self.generated += 1
            logprob = chunk.logprobs[position] if chunk.logprobs else None
            top = chunk.top_logprobs[position] if chunk.top_logprobs else None
            self._waiting.append(Token(token, self._seen, logprob, top))
            texts.append(self._read("" if token in self._eos else self._detokenizer.push([token])))
            if self._stops.matched is not None:
                return self._cut("".join(texts))
        if chunk.finish_reason is None:
            return self._piece("".join(texts))
        texts.append(self._read(self._detokenizer.flush()))
        if self._stops.matched is not None:
            return self._cut("".join(texts))
        texts.append(self._stops.flush())
        self._sent += len("".join(texts))
        return Piece("".join(texts), self._take(len(self._waiting)), chunk.finish_reason)

    def _read(self, text: str) -> str:
        self._seen += len(text)
        return self._stops.push(text)

    def _piece(self, text: str) -> Piece:
        self._sent += len(text)
        return Piece(text, self._take(sum(token.offset < self._sent for token in self._waiting)))

    def _cut(self, text: str) -> Piece:
        piece = self._piece(text)
        return Piece(piece.text, piece.tokens, "stop")

    def _take(self, count: int) -> tuple[Token, ...]:
        return tuple(self._waiting.popleft() for _ in range(count))


def token_by_token(chunk: SampleChunk) -> list[SampleChunk]:
    """The same chunk in as many as it has tokens, so that a choice can end behind any of them."""
    last = len(chunk.token_ids) - 1
    if last < 1:
        return [chunk]
    return [
        SampleChunk(
            chunk.index,
            (token,),
            None if chunk.logprobs is None else (chunk.logprobs[at],),
            None if chunk.top_logprobs is None else (chunk.top_logprobs[at],),
            chunk.finish_reason if at == last else None,
        )
        for at, token in enumerate(chunk.token_ids)
    ]


def prompt_piece(codec: TextCodec, prompt: Sequence[int], first: SampleChunk, with_logprobs: bool) -> Piece:
    """An echoed prompt as the first piece of its choice."""
    detokenizer, text, tokens = Detokenizer(codec, skip_special=False), "", []
    for position, token in enumerate(prompt):
        logprob = first.prompt_logprobs[position] if first.prompt_logprobs else None
        top = first.prompt_top_logprobs[position] if first.prompt_top_logprobs else None
        tokens.append(Token(token, len(text), logprob, top))
        text += detokenizer.push([token])
    text += detokenizer.flush()
    return Piece(text, tuple(tokens) if with_logprobs else ())
