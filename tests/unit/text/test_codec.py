"""TextCodec against Transformers' tokenizer of the same directory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.text import TextCodec
from shared.text.codec import TooLong
from shared.text.template import ChatTemplate
from tests.tiny import tokenizer_directory

USER = {"role": "user", "content": "What is 12+34?"}
ANSWER = {"role": "assistant", "content": "46"}
CHATS: list[list[dict[str, str]]] = [
    [USER],
    [{"role": "system", "content": "Answer with a number."}, USER],
    [USER, ANSWER, {"role": "user", "content": "And  7 + 8 ?\n"}],
    [USER, ANSWER, {"role": "user", "content": "次は? 😀 naïve"}, {"role": "assistant", "content": "  spaced\n\n"}],
    [{"role": "user", "content": "<|im_end|> inside"}, {"role": "assistant", "content": "multi\nline <b>&amp;</b>"}],
]


@pytest.fixture(scope="module")
def directory() -> Path:
    return tokenizer_directory()


@pytest.fixture(scope="module")
def codec(directory: Path) -> TextCodec:
    return TextCodec.load(directory)


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_a_chat_is_the_text_and_ids_that_transformers_makes(
    codec: TextCodec, reference: Any, chat: list[dict[str, str]], prompt: bool
) -> None:
    text = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    assert codec.chat_text(chat, add_generation_prompt=prompt) == text
    ids = reference.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
    assert codec.encode(text) == ids
    if prompt:
        assert codec.chat_ids(chat) == ids


@pytest.mark.parametrize("text", ["", "a", "What is 1+2?", "x   123", "😀 żółć\t\n", "<|im_start|>user"])
def test_text_is_encoded_and_decoded_like_transformers(codec: TextCodec, reference: Any, text: str) -> None:
    ids = reference(text, add_special_tokens=False).input_ids
    assert codec.encode(text) == ids
    assert codec.decode(ids, skip_special=False) == text
    assert codec.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_the_default_base_speaks_chatml(codec: TextCodec) -> None:
    assert codec.vocab_size == 49152
    assert codec.eos_ids == (2,)
    assert codec.encode("<|im_start|><|im_end|>") == [1, 2]
    assert codec.chat_text([USER]).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained"
    )


def test_digits_are_separate_tokens_whatever_stands_before_them(codec: TextCodec) -> None:
    assert [codec.token_text(i) for i in codec.encode("a  12")] == ["a", "  ", "1", "2"]


def test_the_mask_covers_each_assistant_turn_and_the_token_that_ends_it(codec: TextCodec) -> None:
    chat = [USER, ANSWER, {"role": "user", "content": "And 1+1?"}, {"role": "assistant", "content": "2"}]
    ids, mask = codec.conversation(chat)
    assert ids == codec.encode(codec.chat_text(chat, add_generation_prompt=False))
    said = codec.decode([i for i, m in zip(ids, mask, strict=True) if m], skip_special=False)
    assert said == "46<|im_end|>2<|im_end|>"


def test_a_demonstration_begins_with_the_prompt_that_sampling_uses(codec: TextCodec) -> None:
    ids, mask = codec.conversation([USER, ANSWER])
    prompt = codec.chat_ids([USER])
    assert ids[: len(prompt)] == prompt
    assert mask.index(True) == len(prompt)


def test_an_end_token_said_by_the_user_is_not_learned(codec: TextCodec) -> None:
    ids, mask = codec.conversation(CHATS[4])
    said = codec.decode([i for i, m in zip(ids, mask, strict=True) if m], skip_special=False)
    assert said == "multi\nline <b>&amp;</b><|im_end|>"


def test_multibyte_answers_are_masked_whole(codec: TextCodec) -> None:
    ids, mask = codec.conversation([USER, {"role": "assistant", "content": "😀é日本"}])
    said = codec.decode([i for i, m in zip(ids, mask, strict=True) if m], skip_special=False)
    assert said == "😀é日本<|im_end|>"


def test_bad_chats_are_refused_in_words(codec: TextCodec) -> None:
    with pytest.raises(ValueError, match="at least one message"):
        codec.chat_ids([])
    with pytest.raises(ValueError, match="no assistant turn"):
        codec.conversation([USER])
    with pytest.raises(ValueError, match="chat template refused"):
        codec.chat_ids([{"role": "user", "content": None}])


def test_a_base_without_a_template_takes_text_only(tmp_path: Path, directory: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    codec = TextCodec.load(tmp_path)
    assert codec.encode("hi") == TextCodec.load(directory).encode("hi")
    with pytest.raises(ValueError, match="no chat template"):
        codec.chat_ids([USER])


def test_a_template_that_rewrites_earlier_turns_is_refused_for_training(tmp_path: Path, directory: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    template = (
        "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}[{{ m.content }}]{% endif %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        TextCodec.load(tmp_path).conversation([USER, ANSWER, USER, ANSWER])


def test_every_end_token_of_the_generation_config_counts(tmp_path: Path, directory: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    assert TextCodec.load(tmp_path).eos_ids == (0, 2, 7)


def test_half_a_character_is_a_value_error(codec: TextCodec) -> None:
    with pytest.raises(ValueError, match="surrogates not allowed"):
        codec.encode("a\ud83d")
    with pytest.raises(ValueError, match="surrogates not allowed"):
        codec.chat_ids([{"role": "user", "content": "a\ud83d"}])


def test_a_text_that_no_room_could_hold_is_refused_before_it_is_encoded() -> None:
    tokenizer = Unasked()
    codec = TextCodec(tokenizer, ChatTemplate("{{ messages[0].content }}", {}), (0,))
    assert codec.encode("x" * 30, room=10) == [7]
    with pytest.raises(TooLong, match="31 characters; 10 tokens have at most 30"):
        codec.encode("x" * 31, room=10)
    with pytest.raises(TooLong):
        codec.chat_ids([{"role": "user", "content": "x" * 31}], room=10)
    assert tokenizer.asked == 1


class Unasked:
    """A tokenizer whose longest token has three characters."""

    asked = 0

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        return {"x": 0, "xyz": 7}

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        self.asked += 1
        return [SimpleNamespace(ids=[7]) for _ in texts]
