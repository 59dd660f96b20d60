"""What becomes of one delivered message: the middleware around every handler.

In: a raw JetStream message. Out: exactly one of ack (handled), nak (retry later, or at once on
shutdown), or a dead letter and then ack. Invariant: nothing is dropped silently, and while a handler
runs its message is kept from redelivery by `in_progress`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import nats.errors

from shared.errors import Fatal, Retryable
from shared.telemetry import SpanKind, log, log_fields, span, spans
from shared.telemetry.metrics import BUS_HANDLED, BUS_HANDLING_SECONDS

from .received import Received, open_message
from .table import DEAD, Durable

__all__ = ["Delivery", "Handler"]

Handler = Callable[[Received], Awaitable[None]]

_log = logging.getLogger(__name__)

_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 30.0


class Bury(Protocol):
    """Publishes a dead letter and returns once it is stored."""

    async def __call__(
        self, durable: str, subject: str, headers: Mapping[str, str], body: bytes, sequence: str, reason: str
    ) -> None: ...


def retry_delay(deliveries: int) -> float:
    """Seconds until the next try: 0.5, 1, 2, … at most 30."""
    return float(min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** min(deliveries - 1, 10)))


class Delivery:
    """All messages of one durable in this process. `refuse` and `give_back` end it."""

    def __init__(self, durable: Durable, handler: Handler, bury: Bury) -> None:
        self._durable, self._handler, self._bury = durable, handler, bury
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False

    async def __call__(self, raw: Any) -> None:
        """Raises nothing but its own cancellation; `raw` is the client library's message."""
        if self._stopping:
            await self._say(raw.nak())
            return
        started = time.monotonic()
        self._open += 1
        self._idle.clear()
        try:
            outcome = await self._handle(raw)
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()
        BUS_HANDLED.labels(self._durable.name, outcome).inc()
        BUS_HANDLING_SECONDS.labels(self._durable.name).observe(time.monotonic() - started)

    def refuse(self) -> None:
        """From now on whatever comes is given back untouched."""
        self._stopping = True

    async def give_back(self, wait_s: float = 5.0) -> None:
        """Cancel every handler and wait until its message is given back, at most `wait_s`."""
        for task in self._tasks:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._idle.wait()

    async def _handle(self, raw: Any) -> str:
        headers = dict(raw.headers or {})
        deliveries = int(raw.metadata.num_delivered)
        try:
            received = open_message(self._durable.stream, raw.subject, headers, raw.data, deliveries)
        except Fatal as error:
            return await self._dead(raw, headers, str(error))
        envelope = received.envelope
        about: dict[str, str | int] = {
            "messaging.system": "nats",
            "mint.durable": self._durable.name,
            "mint.deliveries": deliveries,
        }
        with (
            span(f"{spans.CONSUME} {envelope.type}", envelope.traceparent, SpanKind.CONSUMER, about),
            log_fields(ce_id=envelope.id, run_id=_run_id(raw.data), durable=self._durable.name),
        ):
            return await self._settle(raw, headers, received)

    async def _settle(self, raw: Any, headers: dict[str, str], received: Received) -> str:
        try:
            await self._run(raw, received)
        except asyncio.CancelledError:
            await self._say(raw.nak(delay=None if self._stopping else retry_delay(received.deliveries)))
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            log(_log, logging.INFO, "given back")
            return "given_back"
        except Fatal as error:
            return await self._dead(raw, headers, str(error))
        except Exception as error:
            return await self._retry(raw, headers, received, error)
        await self._say(raw.ack())
        return "ack"

    async def _run(self, raw: Any, received: Received) -> None:
        """The handler in a task of its own, which shutdown can cancel, with the heartbeat beside it."""
        task = asyncio.create_task(self._call(received))
        beat = asyncio.create_task(self._heartbeat(raw))
        self._tasks.add(task)
        try:
            await task
        finally:
            beat.cancel()
            self._tasks.discard(task)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _call(self, received: Received) -> None:
        await self._handler(received)

    async def _heartbeat(self, raw: Any) -> None:
        while True:
            await asyncio.sleep(self._durable.ack_wait_s / 3)
            await self._say(raw.in_progress())

    async def _retry(self, raw: Any, headers: dict[str, str], received: Received, error: Exception) -> str:
        deliveries = received.deliveries
        if deliveries >= self._durable.max_deliver:
            return await self._dead(raw, headers, f"gave up after {deliveries} deliveries: {_words(error)}")
        expected = isinstance(error, Retryable)
        given = error.delay_s if isinstance(error, Retryable) else None
        delay = retry_delay(deliveries) if given is None else given
        _log.warning(
            "to be retried",
            exc_info=None if expected else error,
            extra={"fields": {"reason": _words(error), "delay_s": delay, "deliveries": deliveries}},
        )
        await self._say(raw.nak(delay=delay))
        return "retry"

    async def _dead(self, raw: Any, headers: dict[str, str], reason: str) -> str:
        if self._durable.stream == DEAD:
            # It is stored on DEAD already; a dead letter about a dead letter would never end.
            log(_log, logging.ERROR, "a dead letter could not be handled", subject=raw.subject, reason=reason)
            await self._say(raw.ack())
            return "dead"
        sequence = f"{raw.metadata.stream}|{raw.metadata.sequence.stream}"
        try:
            await self._bury(self._durable.name, raw.subject, headers, raw.data, sequence, reason)
        except Retryable as error:
            log(_log, logging.ERROR, "a dead letter could not be stored", reason=reason, error=str(error))
            await self._say(raw.nak(delay=retry_delay(int(raw.metadata.num_delivered))))
            return "retry"
        log(_log, logging.WARNING, "dead-lettered", subject=raw.subject, reason=reason)
        await self._say(raw.ack())
        return "dead"

    async def _say(self, answer: Awaitable[None]) -> None:
        """An answer that cannot be sent is no error: without it the message is delivered again."""
        with suppress(nats.errors.Error, OSError):
            await answer


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, Retryable) else f"{type(error).__name__}: {error}"


def _run_id(body: bytes) -> str | None:
    with suppress(ValueError, RecursionError):
        value = json.loads(body)
        if isinstance(value, dict) and isinstance(value.get("run_id"), str):
            return str(value["run_id"])
    return None
