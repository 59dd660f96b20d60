"""From chats to rows: which chats a step takes, and which tokens carry the loss."""

from __future__ import annotations

import pytest

from services.learner.sft import sft_rows, step_chats
from shared.errors import Fatal
from shared.text.codec import TextCodec


def chat(question, *answers):
    return (
        {"role": "user", "content": question},
        *({"role": "assistant", "content": answer} for answer in answers),
    )


CHATS = [chat(f"What is {i}+{i}?", str(2 * i)) for i in range(10)]


@pytest.fixture(scope="module")
def codec(tiny_directory):
    return TextCodec.load(tiny_directory)


def test_a_step_is_a_function_of_seed_and_step_and_an_epoch_sees_each_chat_once():
    names = [name for step in range(1, 6) for name, _ in step_chats(CHATS, 3, step, 4)]
    assert sorted(names[:10]) == sorted(names[10:]) == sorted(f"chat-{i + 1}" for i in range(10))
    assert names[:10] != names[10:]
    assert step_chats(CHATS, 3, 4, 4) == step_chats(CHATS, 3, 4, 4)
    assert step_chats(CHATS, 4, 4, 4) != step_chats(CHATS, 3, 4, 4)
    assert len(step_chats(CHATS[:1], 0, 1, 3)) == 3
    with pytest.raises(Fatal, match="no chats"):
        step_chats([], 0, 1, 4)


def test_the_loss_is_on_the_assistants_tokens_and_sums_to_a_mean(codec):
    rows = sft_rows([("chat-1", CHATS[4]), ("chat-2", chat("hi", "one two three"))], codec, 1024)
    said = [codec.decode([t for t, m in zip(d.targets, d.mask, strict=True) if m], False) for d in rows.data]
    assert said == ["8<|im_end|>", "one two three<|im_end|>"]
    assert sum(sum(d.coefficients) for d in rows.data) == pytest.approx(1.0)
    assert {c for d in rows.data for c in d.coefficients if c} == {1.0 / 6}
    assert rows.metrics == {"rows": 2.0, "truncated_rows": 0.0}


def test_a_long_chat_is_cut_and_counted_and_one_without_answer_left_takes_no_part(codec):
    rows = sft_rows([("chat-1", CHATS[0]), ("chat-2", chat("x " * 500, "y"))], codec, 64)
    assert [datum.name for datum in rows.data] == ["chat-1"]
    assert rows.metrics == {"rows": 1.0, "truncated_rows": 1.0}


def test_a_chat_without_an_assistant_is_refused_by_name(codec):
    with pytest.raises(Fatal, match=r"row chat-7: .*no assistant"):
        sft_rows([("chat-7", chat("hello"))], codec, 64)
