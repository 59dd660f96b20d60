"""Regular expressions that a completion must match: the subset that engines know, of bounded size.

In: a caller's pattern. Out: nothing, or ValueError in words. Invariant: what passes has at most MAX_POSITIONS
places once its repeats are written out, so that no engine builds an automaton beyond all memory from a short text;
nothing is compiled here, for the same reason.
"""

from __future__ import annotations

import importlib
import re
import warnings
from typing import Any

__all__ = ["MAX_PATTERN", "MAX_POSITIONS", "check_pattern"]

MAX_PATTERN = 4096
MAX_POSITIONS = 10_000

# The standard library's own reader of patterns: it makes a tree, whose size is that of the text.
_reader: Any = importlib.import_module("re._parser")

_REFUSED = {
    "ASSERT": "lookahead and lookbehind",
    "ASSERT_NOT": "lookahead and lookbehind",
    "GROUPREF": "references back to a group",
    "GROUPREF_EXISTS": "references back to a group",
    "POSSESSIVE_REPEAT": "possessive repeats",
    "ATOMIC_GROUP": "atomic groups",
}
_ANCHORS = {"AT_BEGINNING", "AT_END"}


def check_pattern(pattern: str) -> None:
    """Raises ValueError for what does not compile, is too long or too large, or has what engines do not know."""
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"the pattern has {len(pattern)} characters; at most {MAX_PATTERN} are allowed")
    if not pattern or "\0" in pattern:
        raise ValueError("the pattern is empty or has a NUL character")
    try:
        pattern.encode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = _reader.parse(pattern)
        positions = _positions(tree)
    except (re.error, OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"the pattern does not compile: {error}") from error
    if tree.state.flags & ~re.UNICODE.value:
        raise ValueError("the pattern sets flags, such as (?i), which engines do not know; write it without")
    if positions > MAX_POSITIONS:
        raise ValueError(
            f"the pattern has {positions} places when its repeats are written out; at most {MAX_POSITIONS} are allowed"
        )


def _positions(tree: Any) -> int:
    return sum(_places(operation.name, argument) for operation, argument in tree)


def _places(operation: str, argument: Any) -> int:
    if operation in _REFUSED:
        raise ValueError(f"the pattern has {_REFUSED[operation]}, which engines do not know")
    match operation:
        case "MAX_REPEAT" | "MIN_REPEAT":
            least, most, inner = argument
            times = least + 1 if most is _reader.MAXREPEAT else most
            return max(1, int(times)) * _positions(inner)
        case "BRANCH":
            return sum(map(_positions, argument[1]))
        case "SUBPATTERN":
            _, added, removed, inner = argument
            if added or removed:
                raise ValueError("the pattern sets flags, such as (?i:…), which engines do not know; write it without")
            return _positions(inner)
        case "AT" if argument.name not in _ANCHORS:
            raise ValueError("the pattern has an anchor other than ^ and $, which engines do not know")
    return 1
