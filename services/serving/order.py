"""Which cold load goes next: the most urgent class, in it the tenant that waited longest for a turn, of
its loads the oldest; every (`OVERTAKES` + 1)-th turn of a class is the oldest load's, whoever asks, so that an
endless row of tenants that were never served passes nobody by.

In flow the loads that wait, out flows the order in which they will be activated. Pure: no clock, no task.
Invariant: nobody is last for ever. Once `OVERTAKES` loads of more urgent classes went before a class that
waits, the next one is that class's; where both less urgent classes are due, the more urgent of them goes
first. So the p-th load of a class is overtaken by more urgent ones at most p · (`OVERTAKES` + 1) times, and has
its turn within p · (`OVERTAKES` + 1) turns of its class.
"""

from __future__ import annotations

import heapq
from collections import ChainMap, OrderedDict, deque
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
        self._given = dict.fromkeys(CLASSES, 0)

    def upcoming(self, loads: Iterable[L]) -> Iterator[L]:
        """The loads in the order of their turns, if none came or went."""
        lanes = {urgency: _Lane[L](self._served[urgency], self._turn, self._given[urgency]) for urgency in CLASSES}
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
        waiting = {other.urgency for other in others}
        _count(self._passed, load.urgency, waiting)
        self._given[load.urgency] = self._given[load.urgency] + 1 if load.urgency in waiting else 0
        served = self._served[load.urgency]
        tenant = _charged(load, served)
        served[tenant] = self._turn
        served.move_to_end(tenant)
        if len(served) > REMEMBERED:
            served.popitem(last=False)


class _Lane(Generic[L]):
    """The loads of one class. One that several tenants wait for is in each tenant's line and goes once."""

    def __init__(self, served: Mapping[str, int], turn: int, given: int) -> None:
        self._served, self._turn, self._given = ChainMap[str, int]({}, dict(served)), turn, given
        self._lines: dict[str, deque[L]] = {}
        self._oldest: deque[L] = deque()
        # A tenant's entry is out of date once the tenant was served, or its first load went.
        self._next: list[tuple[int, int, str]] = []
        self._gone: set[int] = set()
        self.left = 0

    def add(self, load: L) -> None:
        """In order of arrival."""
        self.left += 1
        self._oldest.append(load)
        for tenant in load.tenants:
            line = self._lines.setdefault(tenant, deque())
            line.append(load)
            if len(line) == 1:
                self._line_up(tenant)

    def pop(self) -> L:
        by_arrival = self._given % (OVERTAKES + 1) == OVERTAKES
        load = self._first(self._oldest) if by_arrival else self._of_the_next_tenant()
        assert load is not None
        self._gone.add(load.arrived)
        self._turn += 1
        self._given += 1
        self._served[_charged(load, self._served)] = self._turn
        for tenant in load.tenants:
            self._line_up(tenant)
        self.left -= 1
        return load

    def _line_up(self, tenant: str) -> None:
        first = self._first(self._lines[tenant])
        if first is not None:
            heapq.heappush(self._next, (self._served.get(tenant, -1), first.arrived, tenant))

    def _of_the_next_tenant(self) -> L:
        while True:
            served, arrived, tenant = heapq.heappop(self._next)
            load = self._first(self._lines[tenant])
            if load is not None and (served, arrived) == (self._served.get(tenant, -1), load.arrived):
                return load

    def _first(self, line: deque[L]) -> L | None:
        while line and line[0].arrived in self._gone:
            line.popleft()
        return line[0] if line else None


def _charged(load: Queued, served: Mapping[str, int]) -> str:
    """The tenant whose turn it is that the load goes in."""
    return min(load.tenants, key=lambda name: (served.get(name, -1), name))


def _count(passed: dict[int, int], chosen: int, waiting: Collection[int]) -> None:
    for urgency in CLASSES:
        if urgency == chosen or urgency not in waiting:
            passed[urgency] = 0
        elif urgency > chosen:
            passed[urgency] += 1
