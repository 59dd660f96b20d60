"""How often the engine is interrupted by activations, and how long those who wait may expect to.

In flow the seconds that activations took, out flow the moment of the next and an estimate. Invariant:
while requests run, activations take at most `share` of the time: after one of t seconds the next waits
t · (1/share − 1). While nothing runs there is nobody to stall, and nobody waits.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable

FIRST_GUESS_S = 1.0
"""An activation's expected seconds before any is known."""
RECENT = 32
LOOK_AGAIN_S = 0.05
RETRY_AFTER_S = (1.0, 60.0)

Clock = Callable[[], float]


class Pace:
    """`share` in (0, 1], 1 = unpaced; `busy` says whether requests run now."""

    def __init__(
        self,
        share: float,
        busy: Callable[[], bool],
        clock: Clock = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._share, self._busy, self._clock, self._sleep = share, busy, clock, sleep
        self._until = 0.0

    def spent(self, seconds: float) -> None:
        """An activation took `seconds` and ends now."""
        self._until = max(self._until, self._clock()) + seconds * (1 / self._share - 1)

    async def ready(self) -> None:
        """Returns when the next activation may begin."""
        while self._busy() and (left := self._until - self._clock()) > 0:
            await self._sleep(min(left, LOOK_AGAIN_S))

    def stretch(self) -> float:
        """By how much the pace lengthens the time between two activations now."""
        return 1 / self._share if self._busy() else 1.0


class Estimate:
    """The median of the last `RECENT` activations, or fetches."""

    def __init__(self, first_guess_s: float = FIRST_GUESS_S) -> None:
        self._first_guess_s = first_guess_s
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)

    def each_s(self) -> float:
        return statistics.median(self._recent) if self._recent else self._first_guess_s


def retry_after_s(expected_wait_s: float) -> float:
    low, high = RETRY_AFTER_S
    return min(max(expected_wait_s, low), high)
