"""Loads that no request asks for: what the catalog wants, and what a dead engine had.

In flow revisions, most urgent first, out flow loads as urgent as `PREWARM`, a few at once. Invariants: a revision is
loaded once at a time, however many lists name it; what need not be kept comes only beside all that is here, and
gives up when requests took its room meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from services.serving.errors import Unavailable
from services.serving.memory import MemoryTier
from services.serving.wanted import Wanted
from shared.adapters.manifest import Manifest

logger = logging.getLogger(__name__)


class Preloads:
    """`load` brings one revision in, or raises; `at_once` of one list are under way."""

    def __init__(
        self, memory: MemoryTier, wanted: Wanted, load: Callable[[str], Awaitable[None]], at_once: int
    ) -> None:
        self._memory, self._wanted, self._load, self._at_once = memory, wanted, load, at_once
        self._under_way: Counter[str] = Counter()

    async def run(self, revisions: Iterable[str], enough: Callable[[], bool], join: bool) -> list[str]:
        """In order; what does not work is in the log. No further one is begun once it is `enough`; what has no room
        any more is left out, and so is what another list brings already, unless its end is to be waited for (`join`).
        Gives those for which the catalog or the store was away."""
        left = iter(revisions)
        away: list[str] = []

        async def work() -> None:
            for revision in left:
                if enough():
                    return
                if (join or revision not in self._under_way) and self.has_room(revision):
                    await self._one(revision, away)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._at_once):
                group.create_task(work())
        return away

    def has_room(self, revision: str) -> bool:
        """Whether it may come: what need not be kept only beside all that is here and all else that is under way."""
        if revision not in self._wanted.if_there_is_room:
            return True
        coming = {other for other in (*self._under_way, revision) if not self._memory.has_place(other)}
        return self._memory.fits([self._size(other) for other in coming])

    def is_uncalled_for(self, manifest: Manifest) -> bool:
        """Whether it is brought only because there was room, and there is none any more."""
        revision = manifest.revision
        if revision not in self._under_way or revision not in self._wanted.if_there_is_room:
            return False
        return self._memory.asking(revision) <= self._under_way[revision] and not self._memory.fits(
            [manifest.adapter_bytes]
        )

    async def _one(self, revision: str, away: list[str]) -> None:
        self._under_way[revision] += 1
        try:
            await self._load(revision)
        except Exception as error:
            logger.warning("%s is desired but not loaded: %s", revision, error)
            if isinstance(error, Unavailable):
                away.append(revision)
        finally:
            self._under_way[revision] -= 1
            self._under_way = +self._under_way

    def _size(self, revision: str) -> int:
        """Where it is not known, that of the largest that is."""
        largest = max((entry.bytes for entry in self._memory.entries()), default=0)
        return self._wanted.size(revision) or max(self._wanted.largest(), largest)
