"""Incremental decoding: joined, it is the decoding of the whole; never half a character."""

import random

import pytest

from shared.text import Detokenizer, TextCodec
from tests.tiny import tokenizer_directory


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(tokenizer_directory())


@pytest.mark.parametrize(
    "text", ["plain words, 123", "😀👩‍👩‍👧‍👦 family", "żółć 日本語 עברית", "\n\n  indented\ttext ", ""]
)
def test_pieces_join_to_the_whole_without_half_characters(codec: TextCodec, text: str) -> None:
    detokenizer = Detokenizer(codec)
    pieces = [detokenizer.push([i]) for i in codec.encode(text)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text


def test_an_emoji_comes_with_its_last_byte(codec: TextCodec) -> None:
    ids = codec.encode("😀")
    assert len(ids) > 1
    detokenizer = Detokenizer(codec)
    assert [detokenizer.push([i]) for i in ids] == [""] * (len(ids) - 1) + ["😀"]


def test_an_unfinished_character_is_flushed_as_a_replacement(codec: TextCodec) -> None:
    detokenizer = Detokenizer(codec)
    assert detokenizer.push(codec.encode("a😀")[:-1]) == ""
    assert detokenizer.flush() == "a\ufffd"
    assert detokenizer.flush() == ""


def test_any_ids_in_any_chunks_give_the_decoding_of_all(codec: TextCodec) -> None:
    draw = random.Random(7)
    for _ in range(100):
        ids = [draw.randrange(49152) for _ in range(40)]
        detokenizer, text, at = Detokenizer(codec), "", 0
        while at < len(ids):
            step = draw.randint(1, 5)
            text += detokenizer.push(ids[at : at + step])
            at += step
        assert text + detokenizer.flush() == codec.decode(ids)


def test_special_tokens_are_text_only_when_asked_for(codec: TextCodec) -> None:
    ids = codec.encode("hi<|im_end|>")
    assert Detokenizer(codec).push(ids) == "hi"
    assert Detokenizer(codec, skip_special=False).push(ids) == "hi<|im_end|>"
