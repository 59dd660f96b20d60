"""Preferences from a file: what is taken, and complaints that name the line."""

import json

import pytest
from mint_schemas.common import FileRef
from mint_schemas.training import JsonlPairs

from shared.tasks import Pair, load_pairs, parse_pairs_jsonl

ASSISTANT = "assistant"


def line(prompt: object = "p", chosen: object = "good", rejected: object = "bad") -> bytes:
    return json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}).encode() + b"\n"


def test_pairs_are_texts_or_messages_named_by_their_lines() -> None:
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    steps = [
        {"role": ASSISTANT, "content": "call"},
        {"role": "tool", "content": "found"},
        {"role": ASSISTANT, "content": "so"},
    ]
    one, other = parse_pairs_jsonl(line() + b"\n" + line([system, user], steps, [{"role": ASSISTANT, "content": "no"}]))
    assert one == Pair(
        "line-1",
        ({"role": "user", "content": "p"},),
        ({"role": ASSISTANT, "content": "good"},),
        ({"role": ASSISTANT, "content": "bad"},),
    )
    assert other == Pair("line-3", (system, user), tuple(steps), ({"role": ASSISTANT, "content": "no"},))


def test_a_pairs_chats_choose_what_the_assistant_says_after_the_prompt() -> None:
    prompt = [{"role": "user", "content": "u"}, {"role": ASSISTANT, "content": "a"}, {"role": "user", "content": "v"}]
    steps = [
        {"role": ASSISTANT, "content": "call"},
        {"role": "tool", "content": "found"},
        {"role": ASSISTANT, "content": "so"},
    ]
    (pair,) = parse_pairs_jsonl(line(prompt, steps, "bad"))
    assert [message["weight"] for message in pair.chosen_chat] == [0, 0, 0, 1, 0, 1]
    assert [message["weight"] for message in pair.rejected_chat] == [0, 0, 0, 1]
    assert (pair.chosen_chat.name, pair.rejected_chat.name) == ("line-1.chosen", "line-1.rejected")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(chosen="bad"), "line 3: `chosen` and `rejected` are equal"),
        (line(chosen=[{"role": ASSISTANT, "content": "bad"}]), "line 3: `chosen` and `rejected` are equal"),
        (line(chosen=""), "line 3: `chosen` must be a text or a list of messages and not empty, found an empty text"),
        (line(rejected=" \n"), "line 3: `rejected` must be .* found an empty text"),
        (line(rejected=[]), "line 3: `rejected` must be .* found an empty list"),
        (line(rejected=3), "line 3: `rejected` must be .* found a number"),
        (line(rejected=[{"role": ASSISTANT, "content": " "}]), "line 3: in `rejected` the assistant says nothing"),
        (line(chosen=[{"role": "user", "content": "x"}]), "line 3: `chosen` begins with the user"),
        (
            line(chosen=[{"role": ASSISTANT, "content": "x"}, {"role": "tool", "content": "y"}]),
            "line 3: `chosen` ends with the tool",
        ),
        (line(prompt=""), "line 3: `prompt` must be a text or a list"),
        (line(prompt=[{"role": ASSISTANT, "content": "x"}]), "line 3: the prompt ends with the assistant"),
        (b'{"prompt": "p", "chosen": "a", "chosen": "b", "rejected": "c"}', "line 3 has the key 'chosen' twice"),
        (b"{", "line 3 is not JSON"),
    ],
)
def test_a_bad_pair_is_named_by_its_line(bad: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_pairs_jsonl(line() + b"\n" + bad)


async def test_pairs_are_loaded_from_the_requests_file() -> None:
    async def read(ref: FileRef) -> bytes:
        assert ref.key == "data/acme/x"
        return line() + line("q")

    file = FileRef(key="data/acme/x", sha256="a" * 64, size=3)
    assert [pair.name for pair in await load_pairs(JsonlPairs(kind="jsonl", data=file), read)] == ["line-1", "line-2"]
