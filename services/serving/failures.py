"""Which revisions did not load, why, and for how long that answer stands.

A refusal by admission or by proof stands for the life of the process: a revision never changes. What
came of bad transfers, or ended the engine twice, stands a while, and what says nothing about the revision
only for a moment, so that a later request tries again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from services.serving.errors import LoadFailed, Problem

FORGET_AFTER_S = 2.0
KILLS_ALLOWED = 1
KILL_STANDS_S = 600.0
"""Whatever was being loaded when the engine died is blamed, and may be innocent."""
KEPT = 256


@dataclass(frozen=True)
class Failure:
    """`until` is on the monotonic clock; None = for good."""

    problem: Problem
    until: float | None


class Failures:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: OrderedDict[str, Failure] = OrderedDict()
        self._kills: OrderedDict[str, int] = OrderedDict()

    def add(self, revision: str, problem: Problem) -> None:
        stands_s = problem.stands_s if isinstance(problem, LoadFailed) else FORGET_AFTER_S
        self._found[revision] = Failure(problem, None if stands_s is None else self._clock() + stands_s)
        self._found.move_to_end(revision)
        while len(self._found) > KEPT:
            self._found.popitem(last=False)

    def killed(self, revision: str, error: Exception) -> None:
        """The engine died while it loaded this one: a second time is one too many."""
        kills = self._kills[revision] = self._kills.get(revision, 0) + 1
        self._kills.move_to_end(revision)
        if kills > KILLS_ALLOWED:
            self.add(revision, LoadFailed(f"{revision} ended the engine {kills} times: {error}", KILL_STANDS_S))
        while len(self._kills) > KEPT:
            self._kills.popitem(last=False)

    def clear(self, revision: str) -> None:
        self._found.pop(revision, None)
        self._kills.pop(revision, None)

    def check(self, revision: str) -> None:
        """Raises the Problem that still stands."""
        failure = self._standing(revision)
        if failure is not None:
            raise type(failure.problem)(str(failure.problem))

    def refused(self, revision: str) -> bool:
        """Whether it was given up for a reason of its own, and that still stands."""
        failure = self._standing(revision)
        return failure is not None and isinstance(failure.problem, LoadFailed)

    def given_up(self) -> dict[str, str]:
        """Revision → reason, of those refused; the newest last."""
        return {
            revision: str(self._found[revision].problem) for revision in list(self._found) if self.refused(revision)
        }

    def _standing(self, revision: str) -> Failure | None:
        failure = self._found.get(revision)
        if failure is not None and failure.until is not None and failure.until <= self._clock():
            del self._found[revision]
            return None
        return failure
