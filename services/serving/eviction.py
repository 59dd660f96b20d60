"""What leaves the memory tier first when room is needed.

In flow uses of revisions, out flows a worth: the lowest leaves first. Pins, holds and what is wanted are
the tier's own business. `lru` keeps what was used last. `frequency` keeps what is used steadily: a count of uses
that decays, remembered over an eviction, so that a touch that stays alone does not push out a revision
that is asked for again and again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Literal, Protocol

HALF_LIFE = 20
"""Uses per place of the tier; a hold is two, one as it begins and one as it ends."""
REMEMBERED = 8192
"""Revisions whose uses are counted, resident or not."""

EvictionName = Literal["lru", "frequency"]
Worth = tuple[float, int]


class Eviction(Protocol):
    def used(self, revision: str) -> None: ...

    def worth(self, revision: str) -> Worth:
        """Comparable with other worths of the same moment; revisions never used are worth least."""
        ...


class Lru:
    def __init__(self) -> None:
        self._uses = 0
        self._last: OrderedDict[str, int] = OrderedDict()

    def used(self, revision: str) -> None:
        self._uses += 1
        self._last[revision] = self._uses
        self._last.move_to_end(revision)
        if len(self._last) > REMEMBERED:
            self._last.popitem(last=False)

    def worth(self, revision: str) -> Worth:
        return 0.0, self._last.get(revision, 0)


class Frequency:
    """Equal counts fall back on the last use. `half_life` in uses of any revision: decay by time would
    forget everything over a quiet night and nothing in a busy minute."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._uses = 0
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def used(self, revision: str) -> None:
        self._uses += 1
        self._counts[revision] = (self._count(revision) + 1.0, self._uses)
        self._counts.move_to_end(revision)
        if len(self._counts) > REMEMBERED:
            self._counts.popitem(last=False)

    def worth(self, revision: str) -> Worth:
        return self._count(revision), self._counts.get(revision, (0.0, 0))[1]

    def _count(self, revision: str) -> float:
        count, at = self._counts.get(revision, (0.0, self._uses))
        return count * math.exp2((at - self._uses) / self._half_life)


def make_eviction(name: EvictionName, capacity: int) -> Eviction:
    return Frequency(HALF_LIFE * capacity) if name == "frequency" else Lru()
