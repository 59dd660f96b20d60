"""Matching a pattern that somebody else wrote, bounded in time and memory.

In: the pattern and texts. Out: whether it matches and its first group. The bounds are `host.py`'s.
"""

from __future__ import annotations

from shared.tasks.hosted import Hosted

__all__ = ["Pattern"]


class Pattern:
    """Safe from many threads; they take turns. `groups` counts the pattern's groups."""

    def __init__(self, pattern: str) -> None:
        """Raises HostError for a pattern that does not compile within the bounds."""
        self.host = Hosted({"kind": "pattern", "pattern": pattern})
        self.groups: int = self.host.opened["groups"]

    def search(self, text: str) -> tuple[bool, str | None]:
        """(matched, first group or None). Raises HostError."""
        answer = self.host.ask(text)
        return bool(answer["matched"]), answer["group"]
