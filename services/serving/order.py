"""Which cold load goes next: the most urgent class, in it the tenant that waited longest for a turn, of
its loads the oldest.

In flow the loads that wait, out flows the order in which they will be activated. Pure: no clock, no task.
Invariant: nobody is last for ever. Once `OVERTAKES` loads of more urgent classes went before a class that
waits, the next one is that class's; where both less urgent classes are due, the more urgent of them goes
first. So the p-th load of a class is overtaken at most p · (`OVERTAKES` + 1) times.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from shared.sampling.port import BACKGROUND, INTERACTIVE, PREWARM

CLASSES = (INTERACTIVE, PREWARM, BACKGROUND)
OVERTAKES = 8
REMEMBERED = 4096
"""Tenants whose last turn is known; one that is forgotten counts as never served."""


def class_of(priority: int) -> int:
    """Any priority as one of the three, so that callers cannot make classes of their own."""
    if priority < PREWARM:
        return INTERACTIVE
    return PREWARM if priority < BACKGROUND else BACKGROUND


class Queued(Protocol):
    """`urgency` is one of `CLASSES`; `tenants`, one or more, wait for it; `arrived` rises with time."""

    @property
    def arrived(self) -> int: ...
    @property
    def urgency(self) -> int: ...
    @property
    def tenants(self) -> Collection[str]: ...


L = TypeVar("L", bound=Queued)


class Order:
    def __init__(self) -> None:
        self._turn = 0
        self._served: dict[int, OrderedDict[str, int]] = {urgency: OrderedDict() for urgency in CLASSES}
        self._passed = dict.fromkeys(CLASSES, 0)

    def upcoming(self, loads: Iterable[L]) -> Iterator[L]:
        """The loads in the order of their turns, if none came or went."""
        lanes = {urgency: _Lane[L](self._served[urgency], self._turn) for urgency in CLASSES}
        for load in sorted(loads, key=lambda load: load.arrived):
            lanes[load.urgency].add(load)
        passed = dict(self._passed)
        while waiting := [urgency for urgency in CLASSES if lanes[urgency].left]:
            chosen = next((urgency for urgency in waiting if passed[urgency] >= OVERTAKES), waiting[0])
            _count(passed, chosen, waiting)
            yield lanes[chosen].pop()

    def started(self, load: Queued, others: Iterable[Queued]) -> None:
        """`load` has its turn now; `others` wait on."""
        self._turn += 1
        _count(self._passed, load.urgency, {other.urgency for other in others})
        served = self._served[load.urgency]
        tenant = min(load.tenants, key=lambda name: (served.get(name, -1), name))
        served[tenant] = self._turn
        served.move_to_end(tenant)
        if len(served) > REMEMBERED:
            served.popitem(last=False)


class _Lane(Generic[L]):
    """The loads of one class. One that several tenants wait for is in each tenant's line and goes once."""

    def __init__(self, served: Mapping[str, int], turn: int) -> None:
        self._served, self._turn = served, turn
        self._lines: dict[str, deque[L]] = {}
        self._next: list[tuple[int, int, str]] = []
        self._gone: set[int] = set()
        self.left = 0

    def add(self, load: L) -> None:
        """In order of arrival."""
        self.left += 1
        for tenant in load.tenants:
            if tenant not in self._lines:
                self._lines[tenant] = deque()
                heapq.heappush(self._next, (self._served.get(tenant, -1), load.arrived, tenant))
            self._lines[tenant].append(load)

    def pop(self) -> L:
        while True:
            _, _, tenant = heapq.heappop(self._next)
            line = self._lines[tenant]
            while line and line[0].arrived in self._gone:
                line.popleft()
            if not line:
                continue
            load = line.popleft()
            self._turn += 1
            if line:
                heapq.heappush(self._next, (self._turn, line[0].arrived, tenant))
            self._gone.add(load.arrived)
            self.left -= 1
            return load


def _count(passed: dict[int, int], chosen: int, waiting: Collection[int]) -> None:
    for urgency in CLASSES:
        if urgency == chosen or urgency not in waiting:
            passed[urgency] = 0
        elif urgency > chosen:
            passed[urgency] += 1
