"""A tenant's own lines: what is taken, and complaints that name the line."""

import json

import pytest

from shared.tasks import TaskItem, parse_messages_jsonl, parse_prompts_jsonl

GOOD = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
PROMPT = b'{"prompt": "p", "answer": "1"}\n'


def test_chats_are_read_in_order_with_other_fields_ignored() -> None:
    extra = b'{"id": 3, "messages": [{"role": "assistant", "content": "\xc3\xa9", "name": "x"}]}'
    chats = parse_messages_jsonl(b"\xef\xbb\xbf" + GOOD + b"\r\n  \n" + extra)
    assert chats == [
        ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
        ({"role": "assistant", "content": "é"},),
    ]


def test_prompts_are_texts_or_chats() -> None:
    chat = b'{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "answer": "2"}'
    assert parse_prompts_jsonl(PROMPT + b"\n" + chat) == [
        TaskItem("line-1", ({"role": "user", "content": "p"},), "1"),
        TaskItem("line-3", ({"role": "system", "content": "s"}, {"role": "user", "content": "u"}), "2"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"messages": [', "line 3 is not JSON"),
        (b"\xff\xfe", "line 3 is not UTF-8"),
        (b"[1]", "line 3 must be a JSON object, found a list"),
        (b"{}", "line 3: `messages` must be a list of messages and not empty, found nothing"),
        (b'{"messages": []}', "line 3: .* found an empty list"),
        (b'{"messages": ["hi"]}', r"line 3: `messages\[0\]` must be an object"),
        (b'{"messages": [{"role": "boss", "content": "x"}]}', "line 3: .* role 'boss'; allowed are system, user"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "line 3: .* needs a text as `content`, found a number"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "line 3: no message has the role assistant"),
        (b'{"messages": ' + b"[" * 100_000, "line 3"),
    ],
)
def test_a_bad_chat_is_named_by_its_line(line: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_messages_jsonl(GOOD + b"\n" + line + b"\n" + GOOD)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x"}', "line 2: `answer` must be a text, found nothing"),
        (b'{"prompt": "x", "answer": 5}', "line 2: `answer` must be a text, found a number"),
        (b'{"prompt": "", "answer": "5"}', "line 2: `prompt` must be a text or a list of messages and not empty"),
        (b'{"answer": "5"}', "line 2: `prompt` must be"),
        (
            b'{"prompt": [{"role": "assistant", "content": "x"}], "answer": "5"}',
            "line 2: the prompt ends with",
        ),
        (b"nonsense", "line 2 is not JSON"),
    ],
)
def test_a_bad_prompt_is_named_by_its_line(line: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_prompts_jsonl(PROMPT + line)


def test_a_chat_is_called_by_its_line_in_the_file() -> None:
    assert [chat.name for chat in parse_messages_jsonl(GOOD + b"\n  \r\n" + GOOD + b"\n" + GOOD)] == [
        "line-1",
        "line-4",
        "line-6",
    ]


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (b'{"prompt": "p", "answer": "1", "answer": "2"}', "'answer'"),
        (b'{"prompt": [{"role": "user", "role": "system", "content": "c"}], "answer": "1"}', "'role'"),
    ],
)
def test_a_key_that_stands_twice_is_refused(line: bytes, key: str) -> None:
    with pytest.raises(ValueError, match=f"line 2 has the key {key} twice"):
        parse_prompts_jsonl(PROMPT + line)


def chat(*turns: tuple[str, object]) -> bytes:
    messages = [
        {"role": role, "content": "x", **({} if weight is None else {"weight": weight})} for role, weight in turns
    ]
    return json.dumps({"messages": messages}).encode()


def test_messages_carry_their_weights() -> None:
    (read,) = parse_messages_jsonl(chat(("user", 1), ("assistant", 0), ("assistant", None), ("user", 0.0)))
    assert [message.get("weight") for message in read] == [1, 0, None, 0]


@pytest.mark.parametrize(
    ("turns", "train_on", "message"),
    [
        (
            [("user", None), ("assistant", 2)],
            "assistant",
            r"line 3: `messages\[1\]` has the weight 2; a weight is 0 or 1",
        ),
        ([("user", True), ("assistant", 1)], "assistant", r"line 3: `messages\[0\]` has the weight True"),
        ([("user", "1"), ("assistant", 1)], "assistant", r"line 3: `messages\[0\]` has the weight '1'"),
        ([("user", 1), ("assistant", 0)], "assistant", "line 3: every message of the assistant has the weight 0"),
        ([("user", 0), ("assistant", None)], "chosen", "line 3: train_on is chosen, but no message has the weight 1"),
        ([("assistant", None), ("user", None)], "last", "line 3: train_on is last, but the last message is the user's"),
    ],
)
def test_a_line_that_teaches_nothing_is_named(turns: list[tuple[str, object]], train_on: str, message: str) -> None:
    good = chat(("user", 1), ("assistant", 1))
    with pytest.raises(ValueError, match=message):
        parse_messages_jsonl(good + b"\n\n" + chat(*turns) + b"\n" + good, train_on)


def test_what_is_chosen_may_be_anybodys_turn() -> None:
    (read,) = parse_messages_jsonl(chat(("user", 1), ("assistant", 0)), "chosen")
    assert len(read) == 2


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no lines"):
        parse_prompts_jsonl(data)
    with pytest.raises(ValueError, match="no lines"):
        parse_messages_jsonl(data)
