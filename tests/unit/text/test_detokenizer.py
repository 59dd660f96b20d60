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


class Metaspace:
    """A decoder like Llama 2's: a mark is a space, and a text begins with none."""

    words = ("▁Say", ":", "▁hi", "▁you", "!")

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return "".join(self.words[i] for i in ids).replace("▁", " ").removeprefix(" ")


def test_what_follows_a_prompt_keeps_its_leading_space() -> None:
    alone = Detokenizer(Metaspace())  # type: ignore[arg-type]
    assert [alone.push([i]) for i in (2, 3, 4)] == ["hi", " you", "!"]
    after = Detokenizer(Metaspace(), after=[0, 1])  # type: ignore[arg-type]
    assert [after.push([i]) for i in (2, 3, 4)] == [" hi", " you", "!"]


def test_a_long_prompt_changes_nothing_where_tokens_are_bytes(codec: TextCodec) -> None:
    prompt, ids = codec.encode("words " * 50 + "😀")[:-1], codec.encode(" żółć, then more")
    detokenizer = Detokenizer(codec, after=prompt)
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == codec.decode(ids)
    assert Detokenizer(codec, after=prompt).flush() == ""


class Counting:
    """A codec that counts what it is asked to decode."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec, self.decoded = codec, 0

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        self.decoded += len(ids)
        return self.codec.decode(ids, skip_special)


@pytest.mark.parametrize("tail", [[], ["a"], ["emoji"]])
@pytest.mark.parametrize("kind", ["broken", "special"])
def test_what_never_becomes_a_character_is_decoded_a_bounded_number_of_times(
    codec: TextCodec, kind: str, tail: list[str]
) -> None:
    ids = [codec.encode("a😀")[1] if kind == "broken" else codec.eos_ids[0]] * 2000
    for what in tail:
        ids += codec.encode("a" if what == "a" else "😀 x")
    counting = Counting(codec)
    detokenizer = Detokenizer(counting)  # type: ignore[arg-type]
    text = "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()
    assert text == codec.decode(ids)
    assert counting.decoded < 100 * len(ids)
