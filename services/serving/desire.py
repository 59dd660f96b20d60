"""Following what the catalog wants: the residency bucket → the working set.

Invariant: this replica reports healthy only once everything that was to be kept at its boot is resident or refused
with a reason, and what need not be kept was tried once or something new was desired; after that a missing revision is
loaded at its turn, before background work. A new list waits for no load of an old one.
"""

from __future__ import annotations

import asyncio
import logging

from pydantic import ValidationError

from services.serving.residency import Residency
from shared.bus.bus import Bus
from shared.ending import end
from shared.errors import Retryable
from shared.residency import RESIDENCY_BUCKET, Desired

logger = logging.getLogger(__name__)

RETRY_S = 2.0


class DesiredFollower:
    """One base's entry of the bucket, followed for as long as the replica runs."""

    def __init__(self, bus: Bus, token: str, residency: Residency) -> None:
        self._bus, self._token, self._residency = bus, token, residency
        self._known = asyncio.Event()
        self._new = asyncio.Event()
        self._settled = False
        self._rounds: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._follow(), name="follow-desired"),
            asyncio.create_task(self._reconcile(), name="reconcile-desired"),
        ]

    async def stop(self) -> None:
        await end(*self._tasks)
        await end(*self._rounds)

    def waits_for(self) -> str | None:
        """What still keeps the replica from being healthy, in words; None = nothing."""
        if not self._known.is_set():
            return "waiting for the residency bucket"
        if not self._settled:
            return f"loading desired revisions: {', '.join(self._residency.missing_kept()[:5])}"
        return None

    async def take(self, value: bytes | None) -> None:
        """One value of the bucket; None = nothing is desired for this base."""
        try:
            desired = Desired.model_validate_json(value) if value is not None else Desired(base="")
        except ValidationError as error:
            logger.error("the desired residency of %s cannot be read and is ignored: %s", self._token, error)
            return
        await self._residency.want(desired)
        self._known.set()
        self._new.set()

    async def _reconcile(self) -> None:
        await self._known.wait()
        while True:
            self._new.clear()
            await self._round()
            self._settled = self._settled or not self._residency.missing_kept()
            if not self._new.is_set():
                await self._pause()

    async def _round(self) -> None:
        """Until what is missing was tried once or something new is desired: then what is under way goes on beside
        the next round, and nothing more is begun for this one."""
        over = asyncio.Event()
        trying = asyncio.create_task(self._residency.preload(self._residency.missing(), over.is_set))
        self._rounds.add(trying)
        trying.add_done_callback(self._rounds.discard)
        new = asyncio.create_task(self._new.wait())
        try:
            await asyncio.wait({trying, new}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.set()
            new.cancel()

    async def _pause(self) -> None:
        """Until something new is desired or, while something is missing, until a retry is due."""
        try:
            async with asyncio.timeout(RETRY_S):
                await self._new.wait()
        except TimeoutError:
            return

    async def _follow(self) -> None:
        bucket = self._bus.kv(RESIDENCY_BUCKET)
        while True:
            try:
                entry = await bucket.get(self._token)
                await self.take(entry.value if entry is not None else None)
                async for change in bucket.watch(self._token):
                    await self.take(change.value)
            except Retryable as error:
                logger.warning("the residency bucket cannot be watched (%s); trying again", error)
            await asyncio.sleep(RETRY_S)
