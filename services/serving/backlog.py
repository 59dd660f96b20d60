"""The cold loads that wait or are under way: who waits for which, which goes next, and who is told what.

In flow askers, out flow loads in the order of their turns and the problems that refuse or put off.
Invariants: a revision has at most one load; there are at most `depth`, and no tenant keeps another with fewer out;
a load that nobody waits for, and nobody was told to come back for, is dropped before it is begun. No tasks here:
`loads.py` does the work.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

from services.serving.errors import Loading, Problem, QueueFull
from services.serving.loader import Fetched
from services.serving.order import Order, class_of
from services.serving.pace import Clock, retry_after_s
from shared.sampling.port import BACKGROUND, INTERACTIVE

GRACE_S = 2.0
"""A caller that was told when to come back finds its place kept for that long after."""
KEPT_PLACES = 4
"""So many places are kept for a tenant that nobody waits for now."""

Stage = Literal["queued", "fetching", "fetched", "activating"]


@dataclass(frozen=True)
class Asker:
    """`priority` as in `SampleRequest`; `tenant` shares its class's turns with the others."""

    priority: int = INTERACTIVE
    tenant: str = ""


@dataclass(frozen=True)
class LoadView:
    """`position` 1 is activated next or now."""

    revision: str
    stage: Stage
    urgency: int
    waiters: int
    position: int
    expected_wait_s: float


@dataclass(eq=False)
class Load:
    """One load and everybody who waits for it; as urgent as the most urgent of them. Once they left it
    keeps what it was."""

    revision: str
    arrived: int
    future: asyncio.Future[None]
    stage: Stage = "queued"
    fetched: Fetched | None = None
    kept_until: float = 0.0
    urgency: int = BACKGROUND
    tenants: frozenset[str] = frozenset()
    askers: list[Asker] = field(default_factory=list)

    def refresh(self) -> bool:
        """Whether its place in the order may have changed."""
        before = (self.urgency, self.tenants)
        if self.askers:
            self.urgency = min(class_of(asker.priority) for asker in self.askers)
            self.tenants = frozenset(asker.tenant for asker in self.askers)
        return (self.urgency, self.tenants) != before


class Backlog:
    """`expected_s` tells the wait at a position; `moved` is set, and replaced, at each change."""

    def __init__(self, depth: int, expected_s: Callable[[int], float], clock: Clock) -> None:
        self._depth, self._expected_s, self._clock = depth, expected_s, clock
        self._loads: dict[str, Load] = {}
        self._order = Order()
        self._arrivals = itertools.count()
        self.moved = asyncio.Event()

    def join(self, revision: str, asker: Asker) -> Load:
        """The load of `revision`, a new one if there is none. Raises QueueFull."""
        load = self._loads.get(revision) or self._new(revision, asker)
        load.askers.append(asker)
        if load.refresh():
            self.move()
        return load

    def leave(self, load: Load, asker: Asker) -> None:
        load.askers.remove(asker)
        if not load.askers and self._kept_beside(load) >= KEPT_PLACES:
            load.kept_until = 0.0
        if load.refresh():
            self.move()
        self.prune()

    def late(self, load: Load, waited_s: float) -> Loading:
        """What a caller is told whose time is up; its place is kept until it may be back."""
        position = next((place for place, other in enumerate(self.in_order(), start=1) if other is load), 1)
        expected = self._expected_s(position)
        retry = retry_after_s(expected)
        load.kept_until = self._clock() + retry + GRACE_S
        text = f"{load.revision} is not loaded after {waited_s:.0f} s, at place {position} in the queue; try again"
        return Loading(text, retry, queue_position=position, expected_wait_s=expected)

    def begin(self, load: Load) -> None:
        """`load` has its turn: it is charged to its tenant, and the less urgent were overtaken."""
        load.stage = "activating"
        self._order.started(load, list(self.upcoming()))
        self.move()

    def finish(self, load: Load, problem: Problem | None) -> None:
        if self._loads.get(load.revision) is load:
            del self._loads[load.revision]
        if not load.future.done():
            if problem is None:
                load.future.set_result(None)
            else:
                load.future.set_exception(problem)
        self.move()

    def prune(self) -> None:
        now = self._clock()
        for load in list(self._loads.values()):
            if not load.askers and load.stage in ("queued", "fetched") and load.kept_until <= now:
                del self._loads[load.revision]
                load.future.cancel()
                self.move()

    def move(self) -> None:
        moved, self.moved = self.moved, asyncio.Event()
        moved.set()

    def loads(self) -> list[Load]:
        return list(self._loads.values())

    def in_order(self) -> Iterator[Load]:
        yield from [load for load in self._loads.values() if load.stage == "activating"]
        yield from self.upcoming()

    def upcoming(self) -> Iterator[Load]:
        """Those that have not had their turn, the next first."""
        return self._order.upcoming([load for load in self._loads.values() if load.stage != "activating"])

    def views(self) -> list[LoadView]:
        return [
            LoadView(load.revision, load.stage, load.urgency, len(load.askers), place, self._expected_s(place))
            for place, load in enumerate(self.in_order(), start=1)
        ]

    def _new(self, revision: str, asker: Asker) -> Load:
        self.prune()
        if len(self._loads) >= self._depth and not self._put_out(asker):
            raise self._full(f"{revision} is not loaded and {len(self._loads)} loads are queued already; try again")
        load = Load(revision, next(self._arrivals), asyncio.get_running_loop().create_future())
        load.future.add_done_callback(_retrieve)
        self._loads[revision] = load
        return load

    def _put_out(self, asker: Asker) -> bool:
        """Whether a load made place for one of `asker`: the youngest of the least urgent class below, else the
        youngest of the tenant that has most, where that has two more at least."""
        urgency = class_of(asker.priority)
        waiting = [load for load in self._loads.values() if load.stage != "activating"]
        least = max((load.urgency for load in waiting), default=urgency)
        if least > urgency:
            found, why = [load for load in waiting if load.urgency == least], "a more urgent one"
        else:
            found, why = self._of_the_largest(waiting, asker), "one of a tenant with fewer"
        if not found:
            return False
        load = max(found, key=lambda load: load.arrived)
        self.finish(load, self._full(f"the load of {load.revision} gave way to {why}; try again"))
        return True

    def _of_the_largest(self, waiting: list[Load], asker: Asker) -> list[Load]:
        """What may leave of the tenant with most loads; nothing that another tenant waits for, or more urgent."""
        counts = Counter(tenant for load in self._loads.values() for tenant in load.tenants)
        largest, most = max(counts.items(), key=itemgetter(1), default=("", 0))
        if most <= counts[asker.tenant] + 1:
            return []
        return [load for load in waiting if load.tenants == {largest} and load.urgency >= class_of(asker.priority)]

    def _kept_beside(self, load: Load) -> int:
        """How many other places are kept for its tenants that nobody waits for."""
        now = self._clock()
        return sum(
            other is not load and not other.askers and other.kept_until > now and bool(other.tenants & load.tenants)
            for other in self._loads.values()
            if other.stage in ("queued", "fetched")
        )

    def _full(self, message: str) -> QueueFull:
        """Nothing that waits is less urgent than who is told so: it would have given way."""
        position = len(self._loads) + 1
        expected = self._expected_s(position)
        return QueueFull(message, retry_after_s(expected), queue_position=position, expected_wait_s=expected)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """A failure that nobody waits for any more is no warning of the event loop's."""
    if not future.cancelled():
        future.exception()
