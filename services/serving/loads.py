"""Cold loads as scheduled work: each is fetched to disk, then activated in the engine.

In flow revisions with who asks and how urgently, out flow answers. Fetches run side by side, and only for
the loads that are activated next, except where the files are here already; activations are few and paced.
Invariants: a revision is loaded once, however many wait for it; loads, fetches and activations are bounded; a
caller that goes away never stops a load that others share.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from services.serving.backlog import Asker, Backlog, Load, LoadView, Stage
from services.serving.errors import EngineDown, Problem
from services.serving.loader import Fetched
from services.serving.pace import Clock, Estimate, Pace
from shared.ending import end

logger = logging.getLogger(__name__)


class Stages(Protocol):
    """`fetch` and `activate` raise the `Problem` that ends the load."""

    async def fetch(self, revision: str) -> Fetched | None:
        """The files on local disk; None when there is nothing left to load."""
        ...

    def near(self, revision: str) -> bool:
        """Whether its files are on local disk already, as far as is known."""
        ...

    async def activate(self, fetched: Fetched, began: Callable[[], None]) -> None:
        """Into the engine and proved; `began` is called when the engine is kept busy with it from now on."""
        ...


@dataclass(frozen=True)
class LoadBounds:
    """`depth` bounds the loads that wait or are under way, `fetches` and `activations` those at once."""

    depth: int = 64
    fetches: int = 4
    activations: int = 1

    @property
    def ahead(self) -> int:
        """Only so many of the next loads are fetched: later ones would fill the disk before their turn."""
        return self.fetches + self.activations


class LoadScheduler:
    def __init__(self, stages: Stages, bounds: LoadBounds, pace: Pace, clock: Clock = time.monotonic) -> None:
        self._stages, self._bounds, self._pace, self._clock = stages, bounds, pace, clock
        self._estimate, self._fetch_estimate = Estimate(), Estimate(first_guess_s=0.0)
        self._backlog = Backlog(bounds.depth, self._expected_s, clock)
        self._workers: list[asyncio.Task[None]] = []
        self._stopped = False

    def start(self) -> None:
        if not self._workers:
            steps = [self._fetch] * self._bounds.fetches + [self._activate] * self._bounds.activations
            steps.append(self._fetch_near)
            self._workers = [asyncio.create_task(self._work(step), name="cold-loads") for step in steps]

    async def stop(self) -> None:
        """Ends the loads under way; everybody who waits is told to come back."""
        self._stopped = True
        await end(*self._workers)
        for load in self._backlog.loads():
            self._backlog.finish(load, _shutting_down(load.revision))

    async def wait(self, revision: str, timeout_s: float, asker: Asker) -> None:
        """Join the load of `revision`, queueing it first unless it is queued already.

        Raises QueueFull, Loading (not done within `timeout_s`), or the load's own Problem."""
        if self._stopped:
            raise _shutting_down(revision)
        load = self._backlog.join(revision, asker)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(load.future)
        except TimeoutError:
            raise self._backlog.late(load, timeout_s) from None
        finally:
            self._backlog.leave(load, asker)

    def waiting(self) -> list[str]:
        """Loads under way and queued, the next first."""
        return [load.revision for load in self._backlog.in_order()]

    def views(self) -> list[LoadView]:
        return self._backlog.views()

    def stages(self) -> dict[Stage, int]:
        """How many loads are in each stage."""
        counts: dict[Stage, int] = {"queued": 0, "fetching": 0, "fetched": 0, "activating": 0}
        for load in self._backlog.loads():
            counts[load.stage] += 1
        return counts

    def digests(self) -> set[str]:
        """The adapters on disk that a load is about to use."""
        return {load.fetched.manifest.adapter_sha256 for load in self._backlog.loads() if load.fetched is not None}

    def _expected_s(self, position: int) -> float:
        activation_s = self._estimate.each_s() * self._pace.stretch() / self._bounds.activations
        return position * max(activation_s, self._fetch_estimate.each_s() / self._bounds.fetches)

    async def _work(self, step: Callable[[], Awaitable[bool]]) -> None:
        while True:
            moved = self._backlog.moved
            if not await step():
                await moved.wait()

    async def _fetch(self) -> bool:
        """One fetch; False when there is none to do now."""
        self._backlog.prune()
        ahead = islice(self._backlog.upcoming(), self._bounds.ahead)
        return await self._fetched(next((load for load in ahead if load.stage == "queued"), None))

    async def _fetch_near(self) -> bool:
        """One load whose files are here, however many downloads hang and wherever it is in the order."""
        self._backlog.prune()
        queued = (load for load in self._backlog.upcoming() if load.stage == "queued")
        return await self._fetched(next((load for load in queued if self._stages.near(load.revision)), None))

    async def _fetched(self, load: Load | None) -> bool:
        if load is None:
            return False
        load.stage = "fetching"
        problem: Problem | None = None
        began = self._clock()
        try:
            load.fetched = await self._stages.fetch(load.revision)
        except Exception as error:
            problem = _problem(load.revision, error)
        if load.fetched is None:
            # It had its turn as well: a tenant whose loads all fail here would else always be the next.
            self._backlog.begin(load)
            self._backlog.finish(load, problem)
        else:
            load.stage = "fetched"
            self._fetch_estimate.add(self._clock() - began)
            self._backlog.move()
        return True

    async def _activate(self) -> bool:
        """One activation; False when there is none to do now."""
        if self._next() is None:
            return False
        await self._pace.ready()
        # Chosen after the pause: what came meanwhile may be more urgent, and what waited may be gone.
        load = self._next()
        if load is None:
            return False
        self._backlog.begin(load)
        self._backlog.finish(load, await self._activated(load))
        return True

    def _next(self) -> Load | None:
        self._backlog.prune()
        return next((load for load in self._backlog.upcoming() if load.stage == "fetched"), None)

    async def _activated(self, load: Load) -> Problem | None:
        began: list[float] = []
        problem: Problem | None = None
        assert load.fetched is not None
        try:
            await self._stages.activate(load.fetched, lambda: began.append(self._clock()))
        except Exception as error:
            problem = _problem(load.revision, error)
        if began:
            seconds = self._clock() - began[0]
            self._pace.spent(seconds)
            if problem is None:
                self._estimate.add(seconds)
        return problem


def _problem(revision: str, error: Exception) -> Problem:
    if isinstance(error, Problem):
        return error
    logger.error("loading %s failed unexpectedly", revision, exc_info=error)
    return Problem(f"loading {revision} failed: {error!r}")


def _shutting_down(revision: str) -> EngineDown:
    """Not `Loading`, whose load goes on: callers ask another replica."""
    return EngineDown(f"{revision} was not loaded: this replica is shutting down; try another")
