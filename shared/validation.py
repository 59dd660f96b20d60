"""Validation errors in words: where, what is wrong, what was given; the same at every edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

__all__ = ["explain", "in_words"]

_SHOWN = 80
_MOST = 20


def explain(error: ValidationError) -> list[str]:
    """One line per problem: `method.grpo.group_size: Input should be greater than or equal to 2 (got 0)`."""
    return in_words(error.errors(include_url=False))


def in_words(problems: Sequence[Any], place: Callable[[Sequence[Any]], Sequence[Any]] = tuple) -> list[str]:
    """The same for problems as pydantic lists them; of more than 20 the first, and how many more there are.
    `place` makes of a problem's location what its writer calls it."""
    words = [_sentence(problem, place(problem["loc"])) for problem in problems[:_MOST]]
    return words + [f"and {len(problems) - _MOST} more"] * (len(problems) > _MOST)


def _sentence(problem: Any, loc: Sequence[Any]) -> str:
    where = _shown(".".join(str(part)[: _SHOWN + 1] for part in loc)) or "body"
    context = problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            return f"{where}: there is no such field"
        case "missing":
            return f"{where}: is required"
        case "union_tag_invalid":
            return f"{where}: {context['tag'][:_SHOWN]!r:.{_SHOWN}} is not known; known are {context['expected_tags']}"
        case "union_tag_not_found":
            return f"{where}: {context['discriminator']} is required"
        case "model_attributes_type" | "model_type" | "dict_type":
            return f"{where}: an object is expected"
    message = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    if isinstance(given, str):
        given = given[:_SHOWN]
    if not (given is None or isinstance(given, str | int | float | bool)) or repr(given) in message:
        return f"{where}: {message}"
    return f"{where}: {message} (got {_shortened(repr(given))})"


def _shown(place: str) -> str:
    """Names of unknown fields are the sender's own, of any length and with any character."""
    return _shortened(place if place.isprintable() else repr(place))


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
