"""One request asked of one replica over HTTP, up to its first chunk and on to its last.

In flow a request and an address; out flow what served it and its chunks. Invariants: an answer is passed
on only if it names the base and the revision that were asked for; a silent replica is waited for while it
announces itself, and no longer; until the first chunk is there nothing was passed on, so that another
replica may be asked instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import httpx
from pydantic import ValidationError

from shared.engine.port import SampleChunk, SampleRequest
from shared.errors import Busy, Refused, Retryable
from shared.residency import Replica
from shared.sampling import wire
from shared.sampling.port import Served
from shared.telemetry import current_traceparent

__all__ = ["LOOK_EVERY_S", "EngineLost", "Exchange", "ReplicaLost"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

LOOK_EVERY_S = 3.0
"""How often a wait for a silent replica checks that it still announces itself."""

END_WAIT_S = 1.0
"""How long the end of an answer may take that has nothing more to say."""

_BUSY = frozenset({"loading", "queue_full", "rate_limited"})
_TIMEOUT = httpx.Timeout(None, connect=5.0)


class ReplicaLost(Retryable):
    """The replica did not answer, or broke off."""


class EngineLost(ReplicaLost):
    """Its engine is down, perhaps by this very request."""


class Exchange:
    """`open`, then `served` and `chunks`; `close` in any case: it aborts what still generates, and keeps the
    connection for the next request once every sequence has finished. `broken`: the replica
    cannot take the next request either (the connection broke or was refused, or its engine is down)."""

    served: Served

    def __init__(self, http: httpx.AsyncClient, replica: Replica, is_alive: Callable[[Replica], bool]) -> None:
        self._http, self._replica, self._is_alive = http, replica, is_alive
        self._response: httpx.Response | None = None
        self._lines: AsyncIterator[str] = _nothing()
        self._first: wire.Line | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unfinished = 1
        self.broken = False

    async def open(self, base: str, request: SampleRequest) -> None:
        """Returns when the first chunk is there. Raises Refused, Busy and Retryable as the replica answered,
        ReplicaLost when it did not."""
        response = self._response = await self._post(base, request)
        if response.status_code != 200:
            raise self._refusal(response, await self._from(response.aread()))
        self._lines = response.aiter_lines()
        self.served = await self._read_served(base, request)
        self._unfinished = request.n
        self._first = await self._line()

    async def chunks(self) -> AsyncIterator[SampleChunk]:
        """Raises ReplicaLost when the replica breaks off."""
        line = self._first
        while line is not None and not line.done:
            if line.chunk is not None:
                yield line.chunk
            line = await self._line()

    async def close(self) -> None:
        if self._response is None:
            return
        try:
            if self._unfinished <= 0 and not self.broken:
                await self._read_to_the_end()
        finally:
            await self._response.aclose()

    async def _read_to_the_end(self) -> None:
        """A connection is used again only when its answer was read whole. Nothing of it matters any more."""
        with suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(END_WAIT_S):
                async for _ in self._lines:
                    pass

    async def _post(self, base: str, request: SampleRequest) -> httpx.Response:
        headers = {"content-type": "application/json"}
        if (traceparent := current_traceparent()) is not None:
            headers["traceparent"] = traceparent
        url = self._replica.url.rstrip("/") + wire.SAMPLE_PATH
        content = wire.encode_request(request)
        try:
            prepared = self._http.build_request(
                "POST", url, params={"base": base}, content=content, headers=headers, timeout=_TIMEOUT
            )
        except httpx.InvalidURL as error:
            logger.warning("replica %s announces %r: %s", self._replica.replica, url, error)
            raise self._lost("announces what is no address") from error
        return await self._from(self._http.send(prepared, stream=True))

    def _refusal(self, response: httpx.Response, body: bytes) -> Refused | Retryable:
        """What the answer means: Refused for what a retry cannot mend, Retryable for the rest."""
        try:
            error = wire.WireError.model_validate(response.json()["error"])
        except (ValueError, KeyError, TypeError):
            error = wire.WireError(code="internal", message=body[:200].decode(errors="replace"))
        status = response.status_code
        if status in (400, 404, 409) and error.code != "wrong_base":
            return Refused(error.message, error.code, status=status)
        after = response.headers.get("Retry-After", "")
        delay = float(after) if after.isdigit() else None
        if error.code in _BUSY:
            return Busy(error.message, error.code, status, delay, error.queue_position, error.expected_wait_s)
        self.broken = error.code == "engine_down"
        failure = EngineLost if self.broken else Retryable
        return failure(f"replica {self._replica.replica}: {error.message}", delay)

    async def _read_served(self, base: str, request: SampleRequest) -> Served:
        served = (await self._line()).served
        if served is None:
            raise self._lost("did not say what served the request")
        if served.base != base or served.revision != request.revision:
            raise Retryable(
                f"replica {self._replica.replica} served {served.revision or served.base} instead of "
                f"{request.revision or base}; its answer was dropped"
            )
        return served

    async def _line(self) -> wire.Line:
        text = await self._from(anext(self._lines, None))
        if text is None:
            raise self._lost("ended its answer before it was whole; ask again")
        try:
            line = wire.decode_line(text)
        except ValidationError as error:
            raise self._lost("sent a line that is cut or not understood") from error
        if line.error is not None:
            self.broken = line.error.code == "engine_down"
            failure = EngineLost if self.broken else ReplicaLost
            raise failure(f"replica {self._replica.replica} broke off: {line.error.message}")
        if line.chunk is not None and line.chunk.finish_reason is not None:
            self._unfinished -= 1
        return line

    async def _from(self, waiting: Awaitable[T]) -> T:
        """Await the replica for as long as it announces itself; loads and queues may take their time."""
        try:
            # One timer and no task: this runs for each chunk of every stream.
            async with asyncio.timeout(None) as bound:
                self._look_later(bound)
                return await waiting
        except httpx.HTTPError as error:
            logger.warning("replica %s at %s: %r", self._replica.replica, self._replica.url, error)
            raise self._lost(f"was lost ({type(error).__name__}); ask again") from error
        except TimeoutError as error:
            raise self._lost("stopped announcing itself; ask again") from error
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _look_later(self, bound: asyncio.Timeout) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look, bound)

    def _look(self, bound: asyncio.Timeout) -> None:
        if self._is_alive(self._replica):
            self._look_later(bound)
        else:
            bound.reschedule(asyncio.get_running_loop().time())

    def _lost(self, what: str) -> ReplicaLost:
        self.broken = True
        return ReplicaLost(f"replica {self._replica.replica} {what}")


async def _nothing() -> AsyncIterator[str]:
    return
    yield
