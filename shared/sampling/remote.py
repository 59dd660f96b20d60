"""Sampling over HTTP: the replica that answers is chosen from those that announce themselves.

Rule: any replica on which the revision is ready (every one, for the base), least in flight first; if
it is ready nowhere, the least busy one of that base loads it. Invariant: an answer is passed on only
if it names the base and the revision that were asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx
from pydantic import ValidationError

from shared.bus.bus import Bus
from shared.engine.port import SampleChunk, SampleRequest
from shared.errors import Outage, Refused, Retryable
from shared.residency import Replica
from shared.sampling import wire
from shared.sampling.collect import collect
from shared.sampling.directory import ReplicaDirectory
from shared.sampling.port import Sampled, SampleStream, Served
from shared.telemetry import current_traceparent, span
from shared.telemetry.spans import SAMPLE

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRIES = 3
"""Replicas asked for one sample before the caller is told to come back."""

LOOK_EVERY_S = 3.0
"""How often a wait for a silent replica checks that it still announces itself."""

_TIMEOUT = httpx.Timeout(None, connect=5.0)


class ReplicaLost(Retryable):
    """The connection broke or was refused, or the replica stopped announcing itself."""


class RemoteSampler:
    """`Sampler` over the replicas of the bus. The directory starts with the first sample at the
    latest; give one to share it, and stop the sampler (or the shared directory) at the end."""

    def __init__(self, bus: Bus, http: httpx.AsyncClient, directory: ReplicaDirectory | None = None) -> None:
        self.directory = directory or ReplicaDirectory(bus)
        self._owns_directory = directory is None
        self._http = http
        self._turn = itertools.count()
        self._asked: dict[str, int] = {}

    async def start(self) -> None:
        await self.directory.start()

    async def stop(self) -> None:
        if self._owns_directory:
            await self.directory.stop()

    async def sample(self, base: str, request: SampleRequest) -> Sampled:
        """Everything at once; another replica is asked when one is lost on the way."""
        for last in _tries():
            try:
                async with self.stream(base, request) as stream:
                    return await collect(stream, request)
            except ReplicaLost as error:
                if last:
                    raise
                logger.warning("request %s: %s; asking another", request.request_id, error)
        raise AssertionError("there is at least one try")

    @asynccontextmanager
    async def stream(self, base: str, request: SampleRequest) -> AsyncIterator[SampleStream]:
        """Chunks as they come. Raises Refused and Retryable like `Sampler`; a replica that is lost
        later ends the iteration with Retryable."""
        await self.directory.start()
        with span(SAMPLE, attributes={"mint.revision": request.revision, "mint.request_id": request.request_id}):
            replica, response = await self._open(base, request)
        try:
            lines = response.aiter_lines()
            served = await self._served(replica, lines, base, request)
            yield SampleStream(served, self._chunks(replica, lines))
        finally:
            self._asked[replica.replica] -= 1
            await response.aclose()

    async def _open(self, base: str, request: SampleRequest) -> tuple[Replica, httpx.Response]:
        """A replica that answered 200 and its open response; its place in `_asked` is taken."""
        tried: set[str] = set()
        trouble: Retryable | None = None
        for _ in range(TRIES):
            replica = self._pick(base, request.revision, tried)
            if replica is None:
                break
            tried.add(replica.replica)
            self._asked[replica.replica] = self._asked.get(replica.replica, 0) + 1
            try:
                return replica, await self._post(replica, base, request)
            except BaseException as error:
                self._asked[replica.replica] -= 1
                if not isinstance(error, Retryable):
                    raise
                trouble = error
        if trouble is not None:
            raise trouble
        raise Outage(f"no serving replica of {base} is alive; start one, or wait until it announces itself")

    def _pick(self, base: str, revision: str | None, tried: set[str]) -> Replica | None:
        alive = [replica for replica in self.directory.replicas(base) if replica.replica not in tried]
        ready = [r for r in alive if revision is None or any(found.revision == revision for found in r.ready)]
        turn = next(self._turn)
        candidates = ready or alive
        if not candidates:
            return None
        rotated = candidates[turn % len(candidates) :] + candidates[: turn % len(candidates)]
        return min(rotated, key=lambda r: max(r.in_flight, self._asked.get(r.replica, 0)))

    async def _post(self, replica: Replica, base: str, request: SampleRequest) -> httpx.Response:
        headers = {"content-type": "application/json"}
        if (traceparent := current_traceparent()) is not None:
            headers["traceparent"] = traceparent
        prepared = self._http.build_request(
            "POST",
            replica.url.rstrip("/") + wire.SAMPLE_PATH,
            params={"base": base},
            content=wire.encode_request(request),
            headers=headers,
            timeout=_TIMEOUT,
        )
        response = await self._from(replica, self._http.send(prepared, stream=True))
        if response.status_code == 200:
            return response
        try:
            body = await self._from(replica, response.aread())
        finally:
            await response.aclose()
        raise _refusal(replica, response, body)

    async def _served(self, replica: Replica, lines: AsyncIterator[str], base: str, request: SampleRequest) -> Served:
        line = await self._line(replica, lines)
        served = line.served if line is not None else None
        if served is None:
            raise ReplicaLost(f"replica {replica.replica} did not say what served the request")
        if served.base != base or served.revision != request.revision:
            raise Retryable(
                f"replica {replica.replica} served {served.revision or served.base} instead of "
                f"{request.revision or base}; its answer was dropped"
            )
        return served

    async def _chunks(self, replica: Replica, lines: AsyncIterator[str]) -> AsyncIterator[SampleChunk]:
        while True:
            line = await self._line(replica, lines)
            if line is None:
                raise ReplicaLost(f"the answer of replica {replica.replica} was cut off; ask again")
            if line.done:
                return
            if line.error is not None:
                raise ReplicaLost(f"replica {replica.replica} broke off: {line.error.message}")
            if line.chunk is not None:
                yield line.chunk

    async def _line(self, replica: Replica, lines: AsyncIterator[str]) -> wire.Line | None:
        text = await self._from(replica, anext(lines, None))
        try:
            return None if text is None else wire.decode_line(text)
        except ValidationError as error:
            raise ReplicaLost(f"replica {replica.replica} sent a line that is cut or not understood") from error

    async def _from(self, replica: Replica, waiting: Awaitable[T]) -> T:
        """Await the replica for as long as it announces itself; loads and queues may take their time."""
        task = asyncio.ensure_future(waiting)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_EVERY_S)
                if not task.done() and not self.directory.is_alive(replica):
                    raise ReplicaLost(f"replica {replica.replica} stopped announcing itself; ask again")
            return task.result()
        except httpx.HTTPError as error:
            raise ReplicaLost(f"replica {replica.replica} at {replica.url} was lost: {error!r}") from error
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _refusal(replica: Replica, response: httpx.Response, body: bytes) -> Refused | Retryable:
    """What the answer means: Refused for what a retry cannot mend, Retryable for the rest."""
    try:
        error = wire.WireError.model_validate(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        error = wire.WireError(code="internal", message=body[:200].decode(errors="replace"))
    if response.status_code in (400, 404, 409) and error.code != "wrong_base":
        return Refused(error.message, error.code, error.near, response.status_code)
    after = response.headers.get("Retry-After", "")
    delay = float(after) if after.isdigit() else None
    return Retryable(f"replica {replica.replica}: {error.message}", delay_s=delay)


def _tries() -> list[bool]:
    return [attempt == TRIES - 1 for attempt in range(TRIES)]
