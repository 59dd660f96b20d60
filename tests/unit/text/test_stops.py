"""Stop strings: the outcome depends on the text alone, not on how it is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.text import StopStrings


def run(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    text = "".join(matcher.push(chunk) for chunk in chunks) + matcher.flush()
    return text, matcher.matched


@pytest.mark.parametrize(
    ("stops", "chunks", "expected"),
    [
        (["END"], ["one E", "N", "D two"], ("one ", "END")),
        (["END"], ["one EN", "TER"], ("one ENTER", None)),
        (["END"], ["ends with EN"], ("ends with EN", None)),
        (["abcd", "bc"], ["xabcd"], ("xa", "bc")),
        (["abcd", "cd"], ["xab", "cd"], ("x", "abcd")),
        (["aab"], ["aa", "ab"], ("a", "aab")),
        ([], ["a", "b"], ("ab", None)),
        (["\n\n"], ["a\n", "\nb"], ("a", "\n\n")),
    ],
)
def test_the_first_complete_stop_string_ends_the_text(
    stops: list[str], chunks: list[str], expected: tuple[str, str | None]
) -> None:
    assert run(stops, chunks) == expected


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.text("ab", max_size=4), max_size=8))
def test_chunk_borders_change_nothing(stops: list[str], chunks: list[str]) -> None:
    assert run(stops, chunks) == run(stops, list("".join(chunks)))


def test_nothing_that_may_begin_a_stop_string_is_passed_on() -> None:
    matcher = StopStrings(["END"])
    assert matcher.push("x E") == "x "
    assert matcher.push("ND y") == ""
    assert matcher.push("more") == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
