"""Which tokens of a chat are learnt, by the turns that are named."""

from pathlib import Path
from typing import Any

import pytest

from shared.text import TextCodec
from shared.text.turns import TrainOn
from tests.tiny import tokenizer_directory


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(tokenizer_directory())


def turn(role: str, content: str, weight: int | None = None) -> dict[str, Any]:
    return {"role": role, "content": content, **({} if weight is None else {"weight": weight})}


def learnt(codec: TextCodec, chat: list[dict[str, Any]], train_on: TrainOn = "assistant") -> str:
    ids, mask = codec.conversation(chat, train_on)
    plain = [{"role": m["role"], "content": m["content"]} for m in chat]
    assert ids == codec.encode(codec.chat_text(plain, add_generation_prompt=False))
    return codec.decode([i for i, m in zip(ids, mask, strict=True) if m], skip_special=False)


CHAT = [turn("user", "What is 1+2?", 1), turn("assistant", "3", 0), turn("user", "end"), turn("assistant", "Bye.")]


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("assistant", "Bye.<|im_end|>"),
        ("last", "Bye.<|im_end|>"),
        ("chosen", "What is 1+2?<|im_end|>"),
    ],
)
def test_the_named_turns_and_what_ends_them_are_learnt(codec: TextCodec, train_on: TrainOn, expected: str) -> None:
    assert learnt(codec, CHAT, train_on) == expected


def test_the_last_turn_is_learnt_alone(codec: TextCodec) -> None:
    plain = [turn(m["role"], m["content"]) for m in CHAT]
    assert learnt(codec, plain, "assistant") == "3<|im_end|>Bye.<|im_end|>"
    assert learnt(codec, plain, "last") == "Bye.<|im_end|>"


@pytest.mark.parametrize("content", ["user", "<|im_start|>", "im", "a", "b", "ab", "😀", "user\nuser", "\nx"])
@pytest.mark.parametrize("role", ["system", "user"])
def test_what_anybody_says_is_learnt_without_the_templates_words(codec: TextCodec, role: str, content: str) -> None:
    chat = [turn(role, content, 1), turn("assistant", "no", 0)]
    assert learnt(codec, chat, "chosen") == f"{content}<|im_end|>"


def test_a_later_turn_of_the_user_is_learnt(codec: TextCodec) -> None:
    chat = [turn("user", "p"), turn("assistant", "q"), turn("user", "r s", 1), turn("assistant", "t", 1)]
    assert learnt(codec, chat, "chosen") == "r s<|im_end|>t<|im_end|>"


def test_weights_leave_the_chats_tokens_as_they_are(codec: TextCodec) -> None:
    plain = [turn(m["role"], m["content"]) for m in CHAT]
    assert codec.conversation(CHAT, "last") == codec.conversation(plain, "last")


def test_a_template_sees_no_weights(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer_directory() / name).read_bytes())
    template = "{% for m in messages %}[{{ m.keys() | join(',') }}:{{ m.content }}]{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    codec = TextCodec.load(tmp_path)
    ids, _ = codec.conversation(CHAT, "last")
    assert "weight" not in codec.decode(ids)


@pytest.mark.parametrize(
    ("chat", "train_on", "message"),
    [
        ([turn("user", "a")], "assistant", "no assistant turn"),
        ([turn("user", "a"), turn("assistant", "b", 0)], "assistant", "every assistant turn of the chat has weight 0"),
        ([turn("assistant", "b"), turn("user", "a")], "last", "last turn is not the assistant's"),
        ([], "last", "last turn is not the assistant's"),
        ([turn("user", "a", 0), turn("assistant", "b")], "chosen", "no turn of the chat has weight 1"),
        ([turn("assistant", "b")], "first", "allowed are assistant, last, chosen"),
    ],
)
def test_a_chat_without_such_a_turn_is_refused(
    codec: TextCodec, chat: list[dict[str, Any]], train_on: TrainOn, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        codec.conversation(chat, train_on)
