"""Turns at the resident base: who steps next, and who steps together.

Requests wait in the order in which they came; the first takes the base, and those right behind it join
its turn where `together` says so. In: requests, each from its own task. Out: each one's outcome.
Invariants: one turn at a time, each in a thread of its own, begun only when the thread of the one before
has ended; a request waits for no step that came after it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from shared.errors import Retryable

Check = Callable[[], None]


def both(first: Check, second: Check) -> Check:
    """Raises what either does."""

    def check() -> None:
        first()
        second()

    return check


class Request(Protocol):
    def with_check(self, stopped: Check) -> Request:
        """The same request, which also raises what `stopped` does at its next check."""
        ...


R = TypeVar("R", bound=Request)
O_co = TypeVar("O_co")


@dataclass(eq=False)
class _Waiting(Generic[R, O_co]):
    request: R
    answer: asyncio.Future[O_co]
    since: float = field(default_factory=time.monotonic)


class Turns(Generic[R, O_co]):
    """For one base, on one event loop. `work` blocks; it answers each request with an outcome or an error.

    `together(taken, following)`: whether `following` joins the turn of `taken`. `waited` hears for how
    many seconds each request has waited."""

    def __init__(
        self,
        work: Callable[[Sequence[R]], Sequence[O_co | Exception]],
        together: Callable[[Sequence[R], R], bool],
        waited: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._work, self._together, self._waited = work, together, waited
        self._queue: deque[_Waiting[R, O_co]] = deque()
        self._runner: asyncio.Task[None] | None = None

    async def take(self, request: R, first: bool = False) -> O_co:
        """The outcome of the request's turn; `first`: it had one that came to nothing, or is the short end of what
        the one before began, and has the next.

        When the caller is cancelled the request is told at its next check, and nobody waits for that: a
        shutdown gives its lease back at once."""
        stopped = threading.Event()

        def check() -> None:
            if stopped.is_set():
                raise Retryable("the learner is shutting down; another one takes the step", delay_s=0.0)

        answer: asyncio.Future[O_co] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(request.with_check(check), answer)
        if first:
            self._queue.appendleft(waiting)  # type: ignore[arg-type]
        else:
            self._queue.append(waiting)  # type: ignore[arg-type]
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        try:
            return await answer
        finally:
            stopped.set()
            if waiting in self._queue:
                self._queue.remove(waiting)  # type: ignore[arg-type]

    async def _run(self) -> None:
        while self._queue:
            taken = [self._queue.popleft()]
            try:
                self._join(taken)
            except Exception as error:
                _answer(taken, [error for _ in taken])
            else:
                await self._turn(taken)

    def _join(self, taken: list[_Waiting[R, O_co]]) -> None:
        while self._queue and self._together([it.request for it in taken], self._queue[0].request):
            taken.append(self._queue.popleft())
        for waiting in taken:
            self._waited(time.monotonic() - waiting.since)

    async def _turn(self, taken: Sequence[_Waiting[R, O_co]]) -> None:
        outcomes: Sequence[O_co | Exception]
        try:
            outcomes = await asyncio.to_thread(self._work, [waiting.request for waiting in taken])
        except Exception as error:
            outcomes = [error for _ in taken]
        _answer(taken, outcomes)


def _answer(taken: Sequence[_Waiting[R, O_co]], outcomes: Sequence[O_co | Exception]) -> None:
    for waiting, outcome in zip(taken, outcomes, strict=True):
        if waiting.answer.done():
            continue
        if isinstance(outcome, Exception):
            waiting.answer.set_exception(outcome)
        else:
            waiting.answer.set_result(outcome)
