"""Tool calls within a text depend on the text alone, never on how it was cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gateway.openai.calls import ForcedCall, ToolText, read_call
from services.gateway.openai.choice import Piece, Token, ToolCall
from shared.text.tools import CALL_OPEN

NAMES = frozenset({"add", "now"})
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.0}}\n</tool_call>'
NOW = '<tool_call>{"arguments":{},"name":"now"}</tool_call>'
TRICKY = '<tool_call>\n{"name": "add", "arguments": {"a": "</tool_call> \\" <tool_call>"}}\n</tool_call>'
CALL_ADD, CALL_NOW = ToolCall("add", '{"a": 1, "b": 2.0}'), ToolCall("now", "{}")
CALL_TRICKY = ToolCall("add", '{"a": "</tool_call> \\" <tool_call>"}')

CASES: list[tuple[str, str, list[ToolCall]]] = [
    ("", "", []),
    ("plain <tool text\n", "plain <tool text\n", []),
    (ADD, "", [CALL_ADD]),
    (NOW, "", [CALL_NOW]),
    (TRICKY, "", [CALL_TRICKY]),
    (f"Let me see.\n\n{ADD}", "Let me see.", [CALL_ADD]),
    (f"{ADD}\n{NOW}\n", "", [CALL_ADD, CALL_NOW]),
    (f" {ADD}{ADD} and then\n{NOW} done", " and then done", [CALL_ADD, CALL_ADD, CALL_NOW]),
    ("<tool_call>\nno json\n</tool_call> ok", "<tool_call>\nno json\n</tool_call> ok", []),
    (f"a\n<tool_call> {ADD}", "a\n<tool_call>", [CALL_ADD]),
    (f'<tool_call>say "hi</tool_call> {NOW}', '<tool_call>say "hi</tool_call>', [CALL_NOW]),
    ("<tool_call>{1 < 2}</tool_call>", "<tool_call>{1 < 2}</tool_call>", []),
    ('<tool_call>{\\"a": 1}</tool_call>', '<tool_call>{\\"a": 1}</tool_call>', []),
    (f'<tool_call>{{"a": 1</tool{ADD}', '<tool_call>{"a": 1</tool', [CALL_ADD]),
    (ADD.removesuffix("</tool_call>"), ADD.removesuffix("</tool_call>"), []),
    (ADD.replace('"add"', '"subtract"'), ADD.replace('"add"', '"subtract"'), []),
]

MARKS = ["<tool_call>", "</tool_call>", "<tool", '"', "\\", "{", "}", " ", "\n", "é"]
MALFORMED = [
    "",
    "{}",
    "[]",
    '{"name": "add"}',
    '{"arguments": {}}',
    '{"name": "add", "arguments": "{}"}',
    '{"name": "add", "arguments": null}',
    '{"name": ["add"], "arguments": {}}',
    '{"name": "subtract", "arguments": {}}',
    '{"name": "add", "arguments": {}, "id": 1}',
    '{"name": "add", "name": "now", "arguments": {}}',
    '{"name": "add", "arguments": {"a": NaN}}',
    '{"name": "add", "arguments": {}} {}',
    '{"name": "add", "arguments": {},}',
    '{"name": "add" "arguments": {}}',
    "{'name': 'add', 'arguments': {}}",
    pytest.param('{"name": "add", "arguments": ' + '{"a":' * 5000, id="deep"),
]


def _tokens(text: str) -> tuple[Token, ...]:
    """One token a character, and one for the end of the turn."""
    return tuple(Token(id=i, offset=i) for i in range(len(text) + 1))


def _read(text: str, cuts: list[int], single: bool = False) -> tuple[Piece, list[Piece]]:
    """All of it as one piece, and the pieces as they came."""
    reader = ToolText(NAMES, single)
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts} - {0, len(text)}), len(text)]
    tokens, pieces = _tokens(text), []
    for start, end in pairwise(edges):
        last = end == len(text)
        part = tokens[start : None if last else end]
        pieces.append(reader.push(Piece(text[start:end], part, "stop" if last else None)))
        if pieces[-1].finish_reason is not None:
            break
    return _joined(pieces), pieces


def _joined(pieces: list[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        pieces[-1].finish_reason,
        tuple(call for piece in pieces for call in piece.calls),
    )


@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_every_way_to_cut_a_text_in_two_or_in_characters_gives_the_same(
    text: str, content: str, calls: list[ToolCall]
) -> None:
    finish = "tool_calls" if calls else "stop"
    for cuts in [[], *[[at] for at in range(1, len(text))], list(range(1, len(text)))]:
        found, _ = _read(text, cuts)
        assert (found.text, list(found.calls), found.finish_reason) == (content, calls, finish)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [ADD, NOW, TRICKY, "<tool_call>", "</tool_call>", "<tool", '"', "\\", "{", "}", " ", "\n", "é"]
        ),
        max_size=8,
    ),
    st.lists(st.integers(1, 400), max_size=12),
)
@example([ADD, "\n", "<tool_call>", '"', NOW], [3, 40, 90])
def test_cutting_into_chunks_changes_nothing(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole, _ = _read(text, [])
    found, pieces = _read(text, cuts)
    assert found == whole
    sent = "".join(piece.text for piece in pieces[:-1])
    assert whole.text.startswith(sent)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([ADD, NOW, "ab", " ", "<tool_call>", "\n"]), max_size=6))
def test_what_is_no_call_stays_and_every_token_stands_for_its_own_content(parts: list[str]) -> None:
    text = "".join(parts)
    found, _ = _read(text, [7, 30])
    shown = [token.offset for token in found.tokens if token.offset < len(text)]
    assert "".join(text[at] for at in shown) == found.text
    assert len(found.calls) == text.count(ADD) + text.count(NOW)
    ends_in_call = bool(found.calls) and text.rstrip().endswith("</tool_call>")
    assert (found.tokens[-1:] == _tokens(text)[-1:]) is not ends_in_call


@pytest.mark.parametrize("block", ["<tool_call>a <", "<tool_call>{<b", '<tool_call>{\\"', "<tool_call>[</tool_call>"])
def test_what_cannot_become_a_call_any_more_is_not_held_back(block: str) -> None:
    reader = ToolText(NAMES, single=False)
    assert reader.push(Piece(f"{block}!")).text == f"{block}!"


@pytest.mark.parametrize("at", range(1, len(CALL_OPEN) + 1))
def test_no_piece_holds_part_of_a_tag_that_may_open_a_call(at: int) -> None:
    reader = ToolText(NAMES, single=False)
    assert reader.push(Piece(f"see \n{CALL_OPEN[:at]}")).text == "see"
    assert reader.push(Piece("!", (), "stop")).text == f" \n{CALL_OPEN[:at]}!"


@pytest.mark.parametrize("body", MALFORMED)
def test_a_malformed_block_stays_content(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    found, _ = _read(text, [5, 20])
    assert (found.text, found.calls, found.finish_reason) == (text, (), "stop")
    assert read_call(body, NAMES) is None


@pytest.mark.parametrize("cuts", [[], list(range(1, 200))])
def test_one_call_at_most_ends_the_choice_behind_the_first(cuts: list[int]) -> None:
    found, pieces = _read(f"ok {ADD} more {NOW}", cuts, single=True)
    assert (found.text, found.calls, found.finish_reason) == ("ok", (CALL_ADD,), "tool_calls")
    assert not cuts or len(pieces) == len(f"ok {ADD}")


def test_a_choice_cut_at_its_length_says_so_beside_its_calls() -> None:
    reader = ToolText(NAMES, single=False)
    found = reader.push(Piece(f"{ADD}\n<tool_call>{{", (), "length"))
    assert (found.text, found.calls, found.finish_reason) == ("\n<tool_call>{", (CALL_ADD,), "length")


def test_arguments_are_passed_on_as_they_were_written() -> None:
    written = '{ "big": 12345678901234567890123, "x": 1.50, "é": "\\u00e9" }'
    call = read_call(f'{{"name":"add" , "arguments" : {written} }}', NAMES)
    assert call == ToolCall("add", written)
    assert json.loads(call.arguments)["x"] == 1.5


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_forced_call_is_the_whole_completion(finish: str) -> None:
    reader = ForcedCall(NAMES)
    assert not reader.push(Piece('{"name": "now", ', (Token(1, 0),)))
    found = reader.push(Piece('"arguments": {}}', (Token(2, 16),), finish))
    assert found == Piece("", (), "tool_calls", (CALL_NOW,))


def test_a_forced_call_cut_before_its_end_is_content() -> None:
    reader = ForcedCall(NAMES)
    assert not reader.push(Piece('{"name": "now", ', (Token(1, 0),)))
    found = reader.push(Piece('"arg', (Token(2, 16),), "length"))
    assert found == Piece('{"name": "now", "arg', (Token(1, 0), Token(2, 16)), "length")
