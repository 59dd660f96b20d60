"""From chats to rows: which chats a step takes, and which tokens carry the loss."""

from __future__ import annotations

import pytest

from services.learner.sft import sft_rows, step_chats
from shared.errors import Fatal
from shared.tasks import Chat
from shared.text.codec import TextCodec


def chat(question, *answers):
    return Chat(
        (
            {"role": "user", "content": question},
            *({"role": "assistant", "content": answer} for answer in answers),
        )
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
    with pytest.raises(Fatal, match="no rows"):
        step_chats([], 0, 1, 4)


def test_a_chat_that_knows_where_it_came_from_is_called_by_that():
    assert step_chats([Chat(CHATS[0], "line-7")], 0, 1, 1) == [("line-7", CHATS[0])]


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
    long = [("chat-2", chat("hi", "y " * 500))]
    whole, cut = (sft_rows(long, codec, length).data[0].input_ids for length in (1024, 64))
    assert cut == whole[:63]
    assert sft_rows(long, codec, len(whole) + 1).metrics["truncated_rows"] == 0.0


def test_a_chat_without_an_assistant_is_refused_by_name(codec):
    with pytest.raises(Fatal, match=r"row chat-7: .*no assistant"):
        sft_rows([("chat-7", chat("hello"))], codec, 64)


@pytest.mark.parametrize(
    ("train_on", "wanted"),
    [
        ("assistant", "4<|im_end|>six<|im_end|>"),
        ("last", "six<|im_end|>"),
        ("chosen", "What is 2+2?<|im_end|>six<|im_end|>"),
    ],
)
def test_the_loss_is_on_the_turns_that_are_to_be_learnt(codec, train_on, wanted):
    messages = list(chat("What is 2+2?", "4")) + list(chat("And 3+3?", "six"))
    if train_on == "chosen":
        messages[0], messages[3] = {**messages[0], "weight": 1}, {**messages[3], "weight": 1}
    rows = sft_rows([("a", Chat(messages))], codec, 1024, train_on)
    (datum,) = rows.data
    assert codec.decode([t for t, m in zip(datum.targets, datum.mask, strict=True) if m], False) == wanted


def test_the_nll_is_the_mean_over_the_trained_tokens(codec):
    rows = sft_rows([("a", CHATS[4]), ("b", chat("hi", "one two three"))], codec, 1024)
    trained = [datum.weighed for datum in rows.data]
    logprobs = [[-float(i + 1) if m else 0.0 for m in datum.mask] for i, datum in enumerate(rows.data)]
    wanted = (1.0 * trained[0] + 2.0 * trained[1]) / sum(trained)
    assert rows.report(rows.data, logprobs) == {"nll": pytest.approx(wanted)}
