"""Turns at the resident base: steps that share it run one at a time, each in a thread of its own.

Invariant: a turn begins only when the thread of the one before has ended, even when that one's task was
cancelled and nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from shared.errors import Retryable

T = TypeVar("T")
Check = Callable[[], None]


class Turns:
    """For one base, on one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._thread: asyncio.Future[Any] | None = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        await self._lock.acquire()
        try:
            yield
        finally:
            if self._thread is None or self._thread.done():
                self._lock.release()
            else:
                self._thread.add_done_callback(self._abandoned)

    async def run(self, work: Callable[[Check], T], check: Check) -> T:
        """`work` in a thread, inside a turn. It is told of a cancellation at its next check; whoever
        cancels does not wait for that, so that a shutdown gives its lease back at once."""
        stopped = threading.Event()

        def checked() -> None:
            if stopped.is_set():
                raise Retryable("the learner is shutting down; another one takes the step", delay_s=0.0)
            check()

        thread = asyncio.ensure_future(asyncio.to_thread(work, checked))
        self._thread = thread
        try:
            return await asyncio.shield(thread)
        finally:
            stopped.set()

    def _abandoned(self, thread: asyncio.Future[Any]) -> None:
        if not thread.cancelled():
            thread.exception()  # looked at, so that asyncio does not report it as never retrieved
        self._lock.release()
