"""The keys that the catalog knows, remembered for a bounded time.

In: the sha256 of a key that somebody showed. Out: its row, or None for a key that nobody made. Invariants: an answer
counts from the moment before it was asked for, so that a revoked key ends within `fresh_s` at every gateway; only
while the catalog does not answer is its last answer used for longer, up to `outage_s`, and it is marked. Refused keys
are kept apart, so that strangers who try keys push out none that works.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shared.catalog.api import Page
from shared.catalog.keys import KeyView, NewKey, RevokeKey
from shared.errors import Refused, Retryable

__all__ = ["KeyBook", "Keyring"]


class KeyBook(Protocol):
    """`shared.catalog.keys.KeysClient`. Raises Refused, and Retryable when the catalog does not answer."""

    async def create(self, request: NewKey) -> KeyView: ...
    async def verify(self, sha256: str) -> KeyView: ...
    async def list(self, tenant: str | None = None, limit: int = 50, cursor: str | None = None) -> Page[KeyView]: ...
    async def revoke(self, key_id: str, request: RevokeKey) -> KeyView: ...


@dataclass(frozen=True)
class _Answer:
    """`view` None: there is no such key."""

    view: KeyView | None
    asked_at: float

    @property
    def works(self) -> bool:
        return self.view is not None and self.view.revoked_at is None


class Keyring:
    """Times in seconds. `retry_s`: how long a catalog that did not answer is left alone, for keys that are remembered;
    `remember` bounds what is kept of working and of refused keys each."""

    def __init__(
        self,
        book: KeyBook,
        fresh_s: float = 10.0,
        refused_s: float = 2.0,
        outage_s: float = 300.0,
        retry_s: float = 1.0,
        timeout_s: float = 2.0,
        remember: int = 10_000,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book, self._now, self._remember, self._timeout = book, now, remember, timeout_s
        self._fresh, self._refused, self._outage, self._retry = fresh_s, refused_s, outage_s, retry_s
        self._working: OrderedDict[str, _Answer] = OrderedDict()
        self._others: OrderedDict[str, _Answer] = OrderedDict()
        self._asking: dict[str, asyncio.Task[_Answer]] = {}
        self._away_until = float("-inf")

    async def find(self, sha256: str) -> tuple[KeyView | None, bool]:
        """And whether the answer is an old one. Raises Retryable where there is none to use."""
        last = self._working.get(sha256) or self._others.get(sha256)
        if last is not None and self._age(last) < (self._fresh if last.works else self._refused):
            return last.view, False
        if last is None or not self._usable(last) or self._now() >= self._away_until:
            try:
                return (await self._ask(sha256)).view, False
            except (Retryable, TimeoutError) as error:
                self._away_until = self._now() + self._retry
                if last is None or not self._usable(last):
                    raise Retryable("the catalog does not answer, so this key cannot be checked; try again") from error
        return last.view, True

    def _age(self, answer: _Answer) -> float:
        return self._now() - answer.asked_at

    def _usable(self, answer: _Answer) -> bool:
        """In an outage. What was unknown may have been made since; what was revoked stays so."""
        return answer.view is not None and self._age(answer) < self._outage

    async def _ask(self, sha256: str) -> _Answer:
        """Whoever needs the same answer at the same time waits for the same question."""
        task = self._asking.get(sha256)
        if task is None:
            task = asyncio.create_task(self._asked(sha256))
            self._asking[sha256] = task
            task.add_done_callback(lambda done: self._over(sha256, done))
        return await asyncio.shield(task)

    def _over(self, sha256: str, task: asyncio.Task[_Answer]) -> None:
        del self._asking[sha256]
        if not task.cancelled():
            # Its failure is told to those who wait; when all of them have gone, to nobody.
            task.exception()

    async def _asked(self, sha256: str) -> _Answer:
        asked_at = self._now()
        view: KeyView | None = None
        try:
            async with asyncio.timeout(self._timeout):
                view = await self._book.verify(sha256)
        except Refused as error:
            if error.status != 404:
                raise
        answer = _Answer(view, asked_at)
        self._keep(sha256, answer)
        return answer

    def _keep(self, sha256: str, answer: _Answer) -> None:
        self._working.pop(sha256, None)
        self._others.pop(sha256, None)
        shelf = self._working if answer.works else self._others
        shelf[sha256] = answer
        while len(shelf) > self._remember:
            shelf.popitem(last=False)
