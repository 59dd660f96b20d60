"""A choice's text depends on its tokens and stop strings alone, never on the chunks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.openai.choice import ChoiceText, Piece
from shared.engine.port import SampleChunk
from tests.unit.gateway.kit import CODEC, END

TEXT = st.text(alphabet="ab;é🙂\n", max_size=24)


def _pieces(ids: list[int], cuts: list[int], stops: tuple[str, ...]) -> tuple[Piece, list[Piece], int]:
    """All of it as one piece, the pieces as they came, and how many tokens were counted."""
    choice = ChoiceText(CODEC, stops)
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts} - {0, len(ids)}), len(ids)]
    pieces = []
    for start, end in pairwise(edges):
        finish = "stop" if end == len(ids) else None
        part = tuple(ids[start:end])
        pieces.append(choice.push(SampleChunk(0, part, tuple(-float(i) for i in part), finish_reason=finish)))
        if pieces[-1].finish_reason is not None:
            break
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return Piece("".join(p.text for p in pieces), tokens, pieces[-1].finish_reason), pieces, choice.generated


@settings(max_examples=200, deadline=None)
@given(TEXT, st.lists(st.integers(1, 60), max_size=8), st.lists(TEXT.filter(bool), max_size=3))
def test_cutting_into_chunks_changes_nothing(text: str, cuts: list[int], stops: list[str]) -> None:
    ids = [*CODEC.encode(text), END]
    whole, _, counted = _pieces(ids, [], tuple(stops))
    found, pieces, counted_in_parts = _pieces(ids, cuts, tuple(stops))
    assert (found, counted_in_parts) == (whole, counted)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert found.finish_reason == "stop"
    assert all(stop not in found.text for stop in stops)
    assert text.startswith(found.text)
    if not ends:
        assert found.text == text
        assert [token.id for token in found.tokens] == ids
    assert all("\ufffd" not in piece.text for piece in pieces)
    assert all(token.logprob == -float(token.id) for token in found.tokens)


@settings(max_examples=100, deadline=None)
@given(TEXT, st.lists(st.integers(1, 60), max_size=8), TEXT.filter(bool))
def test_tokens_come_with_the_text_that_they_begin_in(text: str, cuts: list[int], stop: str) -> None:
    found, pieces, _ = _pieces([*CODEC.encode(text), END], cuts, (stop,))
    sent = 0
    for piece in pieces:
        sent += len(piece.text)
        if piece.finish_reason is None:
            assert all(token.offset < sent for token in piece.tokens)
    assert [token.offset for token in found.tokens] == sorted(token.offset for token in found.tokens)


def test_an_unfinished_character_at_the_end_is_replaced() -> None:
    ids = CODEC.encode("aé")[:-1]
    found, _, _ = _pieces(ids, [1, 2], ())
    assert found.text == "a\ufffd"
