"""The load queue: every cold load of a replica, one at a time, first come first served.

In flow revisions, out flow futures. Invariants: a revision is queued or loading at most once, however
many wait for it; the queue is bounded; a caller that goes away never stops a load that others share.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from services.serving.errors import Loading, Problem, QueueFull
from shared.ending import end

logger = logging.getLogger(__name__)

Load = Callable[[str], Awaitable[None]]


class LoadQueue:
    """`load` does one load and raises a `Problem` when it gives up."""

    def __init__(self, load: Load, depth: int) -> None:
        self._load, self._depth = load, depth
        self._shared: OrderedDict[str, asyncio.Future[None]] = OrderedDict()
        self._arrived = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="load-queue")

    async def stop(self) -> None:
        """Ends the load in progress; everybody who waits is told to come back."""
        await end(self._worker)
        for revision in list(self._shared):
            self._finish(revision, Loading(f"{revision} was not loaded: this replica is shutting down; try another"))

    def waiting(self) -> list[str]:
        """Queued and loading revisions, in order."""
        return list(self._shared)

    async def wait(self, revision: str, timeout_s: float) -> None:
        """Join the load of `revision`, queueing it first unless it is queued already.

        Raises QueueFull, Loading (not done within `timeout_s`; the load goes on), or the load's own
        Problem."""
        future = self._shared.get(revision)
        if future is None:
            if len(self._shared) >= self._depth:
                raise QueueFull(f"{revision} is not loaded and {self._depth} loads are queued already; try again")
            future = self._shared[revision] = asyncio.get_running_loop().create_future()
            future.add_done_callback(_retrieve)
            self._arrived.set()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(future)
        except TimeoutError:
            raise Loading(f"{revision} is still being loaded after {timeout_s:.0f} s; try again") from None

    async def _work(self) -> None:
        while True:
            while not self._shared:
                self._arrived.clear()
                await self._arrived.wait()
            await self._run(next(iter(self._shared)))

    async def _run(self, revision: str) -> None:
        problem: Problem | None = None
        try:
            await self._load(revision)
        except Problem as error:
            problem = error
        except Exception as error:
            logger.exception("loading %s failed unexpectedly", revision)
            problem = Problem(f"loading {revision} failed: {error!r}")
        self._finish(revision, problem)

    def _finish(self, revision: str, problem: Problem | None) -> None:
        future = self._shared.pop(revision)
        if future.done():
            return
        if problem is None:
            future.set_result(None)
        else:
            future.set_exception(problem)


def _retrieve(future: asyncio.Future[None]) -> None:
    """A failure that nobody waits for any more is no warning of the event loop's."""
    if not future.cancelled():
        future.exception()
