"""Sampling over HTTP: the replica that answers is chosen from those that announce themselves.

In flows a request for a base and a revision; out flow what served it and its chunks. The rule is in
`routing.py`. Invariant: a request of which nothing was passed on is asked elsewhere when its replica is lost
or full, at most `TRIES` replicas in all; once its first chunk is out, it is never begun again. A request that may
have ended `ENGINES` engines is given to no other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from shared.bus.bus import Bus
from shared.engine.port import SampleRequest
from shared.errors import Busy, Outage, Refused, Retryable
from shared.residency import Replica
from shared.sampling import routing, wire
from shared.sampling.collect import collect
from shared.sampling.directory import ReplicaDirectory
from shared.sampling.exchange import EngineLost, Exchange, ReplicaLost
from shared.sampling.ledger import Ledger
from shared.sampling.port import Sampled, SampleStream
from shared.telemetry import span
from shared.telemetry.spans import SAMPLE

__all__ = ["TRIES", "RemoteSampler", "ReplicaLost"]

logger = logging.getLogger(__name__)

TRIES = 3
"""Replicas asked for one sample before the caller is told to come back."""

ENGINES = 2
"""Engines that were lost under one sample before no other is risked for it."""

WAIT_S = 120.0
"""How long replicas that are full may keep a request that says nothing of its wait, all together: as long as each
does by default, so that a wait used up at one is not begun again at the next."""

REPORT_WAIT_S = 3.0
"""How long a replica has to report its residency."""


@dataclass
class _Search:
    """One request on its way to a replica: whom it asked and what they said. `until` ends the caller's wait for
    the first token, on the monotonic clock; `kept_s` is how long full replicas let it wait. `refusal`: one could
    not serve the adapter; one that takes ranks above `rank` perhaps can. `troubled`: the highest rank of those that
    were in trouble."""

    base: str
    request: SampleRequest
    until: float | None
    tried: set[str] = field(default_factory=set)
    troubles: list[Retryable] = field(default_factory=list)
    kept_s: float = 0.0
    refusal: Refused | None = None
    rank: int = -1
    troubled: int = -1

    def over(self) -> bool:
        if len(self.tried) >= TRIES or sum(isinstance(t, EngineLost) for t in self.troubles) >= ENGINES:
            return True
        if self.until is None:
            full = any(isinstance(trouble, Busy) for trouble in self.troubles)
            return full and self.kept_s >= WAIT_S
        return bool(self.tried) and time.monotonic() >= self.until

    def asked(self) -> SampleRequest:
        """The request, with what is left of the wait."""
        if self.until is None or not self.troubles:
            return self.request
        return replace(self.request, wait_s=max(self.until - time.monotonic(), 0.0))

    def refused(self, replica: Replica, error: Refused) -> None:
        """Raises what no other replica would mend."""
        if error.code != "refused":
            raise error
        self.refusal, self.rank = error, max(self.rank, replica.max_rank)

    def failed(self, error: Retryable, replica: Replica | None = None, after_s: float = 0.0) -> None:
        """Raises what no other replica would mend: a limit is the tenant's wherever it asks, and a load that is
        under way goes on."""
        if isinstance(error, Busy) and (error.status == 429 or error.code == "loading"):
            raise error
        if isinstance(error, Busy):
            self.kept_s += after_s
        if replica is not None:
            self.troubled = max(self.troubled, replica.max_rank)
        self.troubles.append(error)
        level = logging.INFO if isinstance(error, Busy) else logging.WARNING
        logger.log(level, "request %s: %s", self.request.request_id, error)

    def verdict(self) -> Retryable | Refused:
        if self.refusal is not None and self.rank >= self.troubled:
            return self.refusal
        busy = [trouble for trouble in self.troubles if isinstance(trouble, Busy)]
        if busy:
            return min(busy, key=lambda b: float("inf") if b.delay_s is None else b.delay_s)
        if self.troubles:
            return self.troubles[-1]
        return Outage(f"no serving replica of {self.base} is alive; start one, or wait until it announces itself")


class RemoteSampler:
    """`Sampler` over the replicas of the bus. The directory starts with the first sample at the
    latest; give one to share it, and stop the sampler (or the shared directory) at the end."""

    def __init__(
        self,
        bus: Bus,
        http: httpx.AsyncClient,
        directory: ReplicaDirectory | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.directory = directory or ReplicaDirectory(bus)
        self._owns_directory = directory is None
        self._http = http
        self._turn = itertools.count()
        self._ledger = ledger or Ledger()

    async def start(self) -> None:
        await self.directory.start()

    async def stop(self) -> None:
        if self._owns_directory:
            await self.directory.stop()

    async def sample(self, base: str, request: SampleRequest) -> Sampled:
        """Everything at once; another replica is asked when one is lost on the way, since nothing was passed on."""
        search = _search(base, request)
        while True:
            async with self._answer(search) as stream:
                try:
                    return await collect(stream, request)
                except ReplicaLost as error:
                    search.failed(error)

    @asynccontextmanager
    async def stream(self, base: str, request: SampleRequest) -> AsyncIterator[SampleStream]:
        """Chunks as they come; the first is there when the context is entered. Raises Refused and Retryable like
        `Sampler`; a replica that is lost later ends the iteration with ReplicaLost."""
        async with self._answer(_search(base, request)) as stream:
            yield stream

    async def residency(self, base: str | None = None) -> list[dict[str, Any]]:
        """What each live replica (of one base) reports of its tiers, by name; {"replica", "error"} for one that
        does not answer."""
        await self.directory.start()
        return await asyncio.gather(*(self._report(replica) for replica in self.directory.replicas(base)))

    @asynccontextmanager
    async def _answer(self, search: _Search) -> AsyncIterator[SampleStream]:
        await self.directory.start()
        request = search.request
        with span(SAMPLE, attributes={"mint.revision": request.revision, "mint.request_id": request.request_id}):
            replica, exchange = await self._open(search)
        try:
            yield SampleStream(exchange.served, exchange.chunks())
        finally:
            await self._close(replica, request.revision, exchange)

    async def _open(self, search: _Search) -> tuple[Replica, Exchange]:
        """A replica of which the first chunk is there; its place in the ledger is taken."""
        revision = search.request.revision
        while (replica := self._next(search)) is not None:
            search.tried.add(replica.replica)
            self._ledger.enter(replica, revision)
            exchange = Exchange(self._http, replica, self.directory.is_alive)
            began = time.monotonic()
            try:
                await exchange.open(search.base, search.asked())
            except BaseException as error:
                await self._close(replica, revision, exchange)
                if isinstance(error, Refused):
                    search.refused(replica, error)
                elif isinstance(error, Retryable):
                    search.failed(error, replica, time.monotonic() - began)
                else:
                    raise
            else:
                return replica, exchange
        raise search.verdict()

    def _next(self, search: _Search) -> Replica | None:
        if search.over():
            return None
        alive = self.directory.replicas()
        self._ledger.hear(alive)
        of_base = [replica for replica in alive if replica.base == search.base and replica.max_rank > search.rank]
        replicas = _able(of_base, search.request)
        revision = search.request.revision
        mine = self._ledger.mine(replicas, revision)
        ordered = routing.order(replicas, revision, mine, search.tried, next(self._turn))
        return ordered[0] if ordered else None

    async def _close(self, replica: Replica, revision: str | None, exchange: Exchange) -> None:
        self._ledger.hear(self.directory.replicas())
        self._ledger.leave(replica, revision)
        if exchange.broken:
            self._ledger.put_aside(replica)
        await exchange.close()

    async def _report(self, replica: Replica) -> dict[str, Any]:
        url = replica.url.rstrip("/") + wire.RESIDENCY_PATH
        try:
            async with asyncio.timeout(REPORT_WAIT_S):
                answer = await self._http.get(url, timeout=None)
            report: dict[str, Any] = {**answer.raise_for_status().json()}
        except TimeoutError:
            return {"replica": replica.replica, "error": f"no answer within {REPORT_WAIT_S:.0f} s"}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError) as error:
            logger.warning("replica %s: no report from %s: %r", replica.replica, url, error)
            status = f"status {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else None
            return {"replica": replica.replica, "error": f"no report ({status or type(error).__name__})"}
        return report


def _search(base: str, request: SampleRequest) -> _Search:
    return _Search(base, request, None if request.wait_s is None else time.monotonic() + request.wait_s)


def _able(replicas: list[Replica], request: SampleRequest) -> list[Replica]:
    """Those that have what the request needs; all when none has, so that one says what is missing."""
    tokens = len(request.prompt) + request.settings.max_tokens
    able = [replica for replica in replicas if replica.max_context is None or replica.max_context >= tokens]
    if request.settings.grammar is not None:
        able = [replica for replica in able if replica.structured_output]
    return able or replicas
