"""What vLLM said when it was last asked which adapters it has, and for how long that stands.

A question keeps its worker spinning for a second. Invariant: an answer is used again only while nothing was asked of
the engine since, and for a minute at most, so that an engine that hangs is still found out.
"""

from __future__ import annotations

from dataclasses import dataclass

ASK_IDLE_EVERY_S = 60.0


@dataclass(frozen=True)
class Listed:
    """`touched` counts what had been asked of the engine by then; `at` is on the monotonic clock."""

    touched: int
    at: float
    slots: frozenset[int]

    def holds(self, touched: int, now: float) -> bool:
        return touched == self.touched and now - self.at < ASK_IDLE_EVERY_S
