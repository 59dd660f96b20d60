"""The gate before the engine: which request may run now.

In flow requests whose revision is held, out flow `Turn`s, ended by `release`. Invariants: at most
`running` sequences have a turn (a request of more counts as all of them); at most `slots` distinct revisions
have one, so that the engine never chooses between adapters; entering is immediate while there is room and
nobody waits; a turn that is given up leaves nothing behind.

The bound on a wait: no adapter starves another. While a revision waits and every slot is taken, the revision
that has had its slot longest is closed: at once for an interactive request, else after `OVERTAKES` turns of
any others. A closed revision gets no turn but for those of its requests that waited already when it got its
slot, `TENURE` at most in all, and its slot is free when its running requests end. So the first revision in the
order waits for at most `OVERTAKES` + `TENURE` turns of whoever has held longest, and one k-th in the order for
k times as many. The order is that of `fairness`. A holder whose request runs on and on cannot keep its slot from
all: after `TENURE` turns and one for each request that ran when it was closed, which is what a drain of equal
requests takes, the next holder is closed as well, and so on.

Too many sequences for the room that is left hold back whoever is behind them: else single requests would
keep a large one out for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

from services.serving.errors import QueueFull
from services.serving.fairness import Ask, Waiting
from services.serving.order import CLASSES, OVERTAKES, class_of
from services.serving.pace import retry_after_s
from shared.engine.port import SampleRequest
from shared.sampling.port import INTERACTIVE

TENURE = 16
PACE = 64
"""Turns that the expected wait is reckoned from."""


@dataclass(frozen=True)
class TurnBounds:
    """`running` in sequences: above the engine's own batch, so that its next step never waits for the gate, and
    not by much, since the order inside the engine is the engine's. `waiting` in requests, of which those that are
    not interactive may fill half. `wait_s` bounds the wait of a request that does not say."""

    running: int = 128
    waiting: int = 1024
    wait_s: float = 120.0


@dataclass(eq=False)
class Turn(Ask):
    """`rank` is the engine's priority: the order of the turns, in which a request of a less urgent class
    is overtaken inside the engine by `OVERTAKES` later turns per class."""

    rank: int = 0
    entered: asyncio.Future[None] | None = None
    running: bool = False
    over: bool = False


@dataclass
class _Slot:
    """`since` is the arrival that got it."""

    since: int
    given: int = 0
    running: int = 0


class Turns:
    def __init__(self, bounds: TurnBounds, clock: Callable[[], float] = time.monotonic) -> None:
        self.bounds, self._clock = bounds, clock
        self._waiting = Waiting()
        self._slots = 1
        # In the order in which they got their slot.
        self._holders: dict[str, _Slot] = {}
        self._arrivals = self._given = self._shut_out = 0
        self._patience = TENURE
        self._pace: deque[float] = deque(maxlen=PACE)
        self.running = 0
        self.requests = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def take(self, request: SampleRequest, slots: int, wait_s: float | None = None) -> Turn:
        """A turn, to be given back with `release`. `slots` is how many distinct revisions the engine runs.

        Raises QueueFull when too many wait already, or when the turn did not come within `wait_s`."""
        self._slots = slots
        turn = self._turn(request)
        self._add(turn)
        if turn.running:
            return turn
        if not self._has_place(turn):
            self.release(turn)
            raise self._full(turn)
        turn.entered = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(wait_s):
                await turn.entered
        except TimeoutError:
            if turn.running:
                return turn
            problem = self._late(turn, wait_s)
            self.release(turn)
            raise problem from None
        except BaseException:
            self.release(turn)
            raise
        return turn

    def release(self, turn: Turn) -> None:
        """Give back a turn, or the place of one that waits. More than once: no-op."""
        if turn.over:
            return
        turn.over = True
        if turn.running:
            self._leave(turn)
        else:
            self._waiting.remove(turn)
        self._advance()

    def _turn(self, request: SampleRequest) -> Turn:
        self._arrivals += 1
        return Turn(
            number=self._arrivals,
            tenant=request.tenant,
            revision=request.revision,
            urgency=class_of(request.priority),
            sequences=min(max(request.n, 1), self.bounds.running),
            cost=len(request.prompt) + max(request.n, 1) * max(request.settings.max_tokens, 1),
        )

    def _add(self, turn: Turn) -> None:
        if not self._waiting:
            self._nobody_is_shut_out()
            if self._has_slot(turn) and self._fits(turn):
                self._enter(turn)
                return
            self._pace.append(self._clock())
        self._waiting.add(turn)
        self._advance()

    def _advance(self) -> None:
        while self._waiting and self.running < self.bounds.running:
            turn = self._next()
            if not isinstance(turn, Turn) or not self._fits(turn):
                break
            self._waiting.take(turn)
            self._pace.append(self._clock())
            self._enter(turn)
            if turn.entered is not None and not turn.entered.done():
                turn.entered.set_result(None)
        if not self._waiting:
            self._pace.clear()

    def _next(self) -> Ask | None:
        if len(self._holders) < self._slots:
            return self._waiting.first()
        return self._waiting.first_of((None, *self._holders), partial(self._enters, self._closed()))

    def _enter(self, turn: Turn) -> None:
        self._given += 1
        turn.running, turn.rank = True, self._given + OVERTAKES * CLASSES.index(turn.urgency)
        self.running += turn.sequences
        self.requests += 1
        if turn.revision is not None and turn.revision not in self._holders:
            self._nobody_is_shut_out()
        else:
            self._shut_out += 1
        if turn.revision is not None:
            slot = self._holders.setdefault(turn.revision, _Slot(self._arrivals))
            slot.given += 1
            slot.running += 1

    def _leave(self, turn: Turn) -> None:
        self.running -= turn.sequences
        self.requests -= 1
        if turn.revision is not None:
            slot = self._holders[turn.revision]
            slot.running -= 1
            if not slot.running:
                del self._holders[turn.revision]

    def _closed(self) -> set[str]:
        """Every slot is taken: the revisions that must leave theirs to one that waits, if any does."""
        urgency = self._waiting.most_urgent_beside(self._holders)
        if urgency is None:
            self._nobody_is_shut_out()
            return set()
        shut_out = self._shut_out - (OVERTAKES if urgency > INTERACTIVE else 0)
        if shut_out < 0:
            return set()
        return set(islice(self._holders, 1 + shut_out // self._patience))

    def _nobody_is_shut_out(self) -> None:
        """No revision waits for a slot, or the first one has just got it."""
        self._shut_out, self._patience = 0, TENURE + self.requests

    def _enters(self, closed: set[str], ask: Ask) -> bool:
        if ask.revision is None or ask.revision not in closed:
            return True
        slot = self._holders[ask.revision]
        return ask.number <= slot.since and slot.given < TENURE

    def _has_slot(self, ask: Ask) -> bool:
        return ask.revision is None or ask.revision in self._holders or len(self._holders) < self._slots

    def _fits(self, turn: Turn) -> bool:
        return self.running + turn.sequences <= self.bounds.running

    def _has_place(self, turn: Turn) -> bool:
        patient = len(self._waiting) - self._waiting.up_to(INTERACTIVE)
        crowded = turn.urgency > INTERACTIVE and patient > max(self.bounds.waiting // 2, 1)
        return len(self._waiting) <= self.bounds.waiting and not crowded

    def _expected_s(self, position: int) -> float | None:
        """How long `position` turns take at the pace of the last ones; None before there is one."""
        if len(self._pace) < 2:
            return None
        return position * (self._clock() - self._pace[0]) / (len(self._pace) - 1)

    def _full(self, turn: Turn) -> QueueFull:
        position = self._waiting.up_to(turn.urgency) + 1
        return self._problem("as many requests as may wait for a turn do so already", position)

    def _late(self, turn: Turn, wait_s: float | None) -> QueueFull:
        position = self._waiting.ahead_of(turn) + 1
        return self._problem(f"no turn came within {wait_s:g} s", position)

    def _problem(self, what: str, position: int) -> QueueFull:
        expected = self._expected_s(position)
        return QueueFull(
            f"{what} ({self.requests} requests run, {len(self._waiting)} wait); try again",
            None if expected is None else retry_after_s(expected),
            queue_position=position,
            expected_wait_s=None if expected is None else round(expected, 3),
        )
