"""Validation errors in words: where, what is wrong, what was given."""

from __future__ import annotations

from pydantic import ValidationError

__all__ = ["explain"]


def explain(error: ValidationError) -> list[str]:
    """One line per problem: `method.grpo.group_size: Input should be greater than or equal to 2 (got 0)`."""
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in problem["loc"]) or "body"
        given = problem.get("input")
        shown = f" (got {given!r:.80})" if isinstance(given, str | int | float | bool) or given is None else ""
        lines.append(f"{where}: {problem['msg'].removeprefix('Value error, ')}{shown}")
    return lines
