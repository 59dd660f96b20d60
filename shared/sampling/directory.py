"""The live view of the replicas bucket: which serving replicas there are, and what is ready on each.

In flow `Replica` values that replicas announce; out flows the set of those alive. Invariant: a replica
that stopped announcing is out of the view within `REPLICA_TTL_S`, whether or not the bucket tells. While
the bus itself is away nobody can announce: the view then stays as it was, and users are served on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from shared.bus.bus import Bus
from shared.ending import end
from shared.errors import Retryable
from shared.residency import REPLICA_TTL_S, REPLICAS_BUCKET, Replica

logger = logging.getLogger(__name__)

REWATCH_S = 1.0
PING_EVERY_S = 1.0
AWAY_AFTER_S = 3.0


@dataclass(frozen=True)
class _Seen:
    replica: Replica
    until: float


class ReplicaDirectory:
    """`start` returns when the first view is complete; calling it again is harmless."""

    def __init__(self, bus: Bus, ttl_s: float = REPLICA_TTL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus, self._ttl, self._clock = bus, ttl_s, clock
        self._seen: dict[str, _Seen] = {}
        self._reached = clock()
        self._tasks: list[asyncio.Task[None]] = []
        self._synced = asyncio.Event()

    async def start(self) -> None:
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._follow(), name="replica-directory"),
                asyncio.create_task(self._ping(), name="replica-directory-ping"),
            ]
        await self._synced.wait()

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        await end(*tasks)

    def replicas(self, base: str | None = None) -> list[Replica]:
        """The replicas alive now (of one base), by name."""
        now = min(self._clock(), self._reached + AWAY_AFTER_S)
        alive = [seen.replica for _, seen in sorted(self._seen.items()) if seen.until > now]
        return [replica for replica in alive if base is None or replica.base == base]

    def is_alive(self, replica: Replica) -> bool:
        """Whether that very boot of the replica still announces itself."""
        return any(r.replica == replica.replica and r.boot_id == replica.boot_id for r in self.replicas(replica.base))

    def observe(self, key: str, value: bytes | None) -> None:
        """Take one value of the bucket; None = the replica left."""
        if value is None:
            self._seen.pop(key, None)
        else:
            try:
                replica = Replica.model_validate_json(value)
            except ValidationError as error:
                logger.warning("replica %s announced what cannot be read (%s); ignored", key, error.errors()[0]["msg"])
                return
            # A value read back from the bucket may be old already: its age comes off the time it has left.
            # Clocks may differ between machines, so that an age is believed within [0, ttl] only.
            age = min(max(time.time() - replica.at, 0.0), self._ttl)
            first = key not in self._seen
            self._seen[key] = _Seen(replica, self._clock() + self._ttl - (age if first else 0.0))

    def reached(self) -> None:
        """The bus answered now. After an outage every announcement gets the lost time back, so that
        those alive can speak before they are judged."""
        now = self._clock()
        lost = now - self._reached - AWAY_AFTER_S
        if lost > 0:
            self._seen = {key: _Seen(seen.replica, seen.until + lost) for key, seen in self._seen.items()}
        self._reached = now

    async def _ping(self) -> None:
        while True:
            if await self._bus.ping():
                self.reached()
            await asyncio.sleep(PING_EVERY_S)

    async def _follow(self) -> None:
        bucket = self._bus.kv(REPLICAS_BUCKET)
        while True:
            try:
                for key, entry in (await bucket.entries()).items():
                    self.observe(key, entry.value)
                self._synced.set()
                async for entry in bucket.watch():
                    self.observe(entry.key, entry.value)
            except Retryable as error:
                logger.warning("the replicas bucket cannot be watched (%s); trying again", error)
            await asyncio.sleep(REWATCH_S)
