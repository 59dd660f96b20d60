"""The bus as services see it: publish, consume, buckets, advisories, and a shutdown that gives back.

Owns the FastStream broker and its connection. Declares nothing on the server (the provisioner does).
Each concurrent handler has a pull loop of its own that asks for one message at a time, so that no
message waits in this process while its ack wait runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import nats.errors
from faststream import AckPolicy
from faststream.nats import JStream, NatsBroker, NatsMessage, PullSub

from shared.errors import Fatal, Retryable

from .advisories import ADVISORY_SUBJECTS, AdvisoryHandler, handle_advisory
from .check import require_equal
from .delivery import Delivery, Handler
from .kv import Bucket
from .publishing import Publisher
from .table import Table

__all__ = ["Bus"]

_PULL_TIMEOUT_S = 2.0
_LAST_LOOKS = 50

_logger = logging.getLogger("shared.bus.client")


async def _as_is(message: NatsMessage) -> Any:
    """No decoding by the framework: what cannot be decoded must reach the dead-letter middleware."""
    return message


def _patient(pull: Any) -> None:
    """The framework's pull loop asks again at once after a failure, and on a closed connection a question
    fails without a wait: it would keep everything else in the process from ever running."""
    fetch = pull.fetch

    async def fetch_or_wait(*args: Any, **options: Any) -> Any:
        try:
            return await fetch(*args, **options)
        except nats.errors.ConnectionClosedError:
            await asyncio.sleep(0.1)
            raise

    pull.fetch = fetch_or_wait


class Bus(Publisher):
    """`publish` comes from Publisher. One per process."""

    def __init__(self, url: str, table: Table, name: str = "mint") -> None:
        broker = NatsBroker(
            url,
            name=name,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.5,  # type: ignore[arg-type]
            connect_timeout=2,
            ping_interval=10,
            # Delivery answers every message itself; the framework's own policies can lose one (its
            # default terminates a message whose handler failed).
            ack_policy=AckPolicy.MANUAL,
            graceful_timeout=5.0,
            closed_cb=self._closed,
            decoder=_as_is,
            apply_types=False,
            logger=_logger,
            log_level=logging.DEBUG,
        )
        super().__init__(broker)
        self._url, self._table = url, table
        self._connected = self._ending = False
        self._lost = asyncio.Event()
        self._deliveries: list[Delivery] = []
        self._subscribers: list[Any] = []
        self._buckets: dict[str, Bucket] = {}

    @property
    def table(self) -> Table:
        return self._table

    async def connect(self, timeout_s: float = 5.0) -> None:
        """Raises Retryable when nobody answers within `timeout_s`; may be called again."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._broker.start()
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise Retryable(f"no NATS server answers at {self._url}: {type(error).__name__} {error}") from error
        self._connected = True

    async def lost(self) -> None:
        """Waits, and raises Fatal once the connection is closed for good: the server ends it over a
        protocol error, and the client then never connects again. Other losses mend by themselves."""
        await self._lost.wait()
        raise Fatal(f"the NATS server at {self._url} closed the connection over an error of its client")

    async def check(self) -> None:
        """Raises Fatal, listing the differences, when what exists is not the table."""
        try:
            await require_equal(self._js(), self._table)
        except (TimeoutError, nats.errors.Error) as error:
            raise Retryable(f"JetStream at {self._url} does not answer: {type(error).__name__} {error}") from error

    async def ping(self, timeout_s: float = 1.0) -> bool:
        """Whether JetStream answers within `timeout_s`: a round trip, since a lost connection looks
        connected until something is sent."""
        deadline = time.monotonic() + timeout_s
        if not await self._broker.ping(timeout_s):
            return False
        try:
            # Not `flush`: a PONG that comes after its time-out ends the client's read loop.
            await self._broker.connection.request("$JS.API.INFO", timeout=max(0.1, deadline - time.monotonic()))
        except (nats.errors.Error, TimeoutError, OSError):
            return False
        return True

    async def consume(
        self, durable: str, handler: Handler, concurrency: int = 1, ack_wait_s: float | None = None
    ) -> None:
        """Start handling the messages of `durable`, up to `concurrency` at once in this process.

        The handler returns = ack; Fatal = dead letter; anything else = retried, Retryable after its
        `delay_s`. It may run longer than ack_wait, but must not block the event loop."""
        spec = self._table.durable(durable)
        if ack_wait_s is not None:
            spec = replace(spec, ack_wait_s=ack_wait_s)
        delivery = Delivery(spec, handler, self.bury)
        self._deliveries.append(delivery)

        async def deliver(message: NatsMessage) -> None:
            await delivery(message.raw_message)

        for _ in range(concurrency):
            subscriber = self._broker.subscriber(
                spec.filters[0],
                durable=spec.name,
                stream=JStream(spec.stream, declare=False),
                pull_sub=PullSub(batch_size=1, timeout=_PULL_TIMEOUT_S),
                no_reply=True,
            )
            subscriber(deliver)
            await subscriber.start()
            _patient(subscriber.subscription)
            self._subscribers.append(subscriber)

    async def advisories(self, handler: AdvisoryHandler) -> None:
        """Bury what reached max_deliver and tell the handler; each advisory reaches one process."""

        async def receive(message: NatsMessage) -> None:
            await handle_advisory(self._js(), self.bury, message.raw_message.data, handler)

        for subject in ADVISORY_SUBJECTS:
            subscriber = self._broker.subscriber(subject, queue="mint-advisories", no_reply=True)
            subscriber(receive)
            await subscriber.start()

    def kv(self, bucket: str) -> Bucket:
        """A bucket of the table. Raises ValueError for another."""
        if bucket not in {spec.name for spec in self._table.buckets}:
            raise ValueError(f"no bucket {bucket!r} in the bus table")
        return self._buckets.setdefault(bucket, Bucket(bucket, self._js))

    async def drain(self) -> None:
        """Take no more messages and give back at once what is in hand, so that another replica has it
        within a moment. Publishing goes on until `close`."""
        if not self._connected:
            return
        for delivery in self._deliveries:
            delivery.refuse()
        await asyncio.gather(*(self._stop_pulling(subscriber) for subscriber in self._subscribers))
        await asyncio.gather(*(delivery.give_back() for delivery in self._deliveries))
        with suppress(nats.errors.Error, asyncio.TimeoutError):
            await self._broker.connection.flush(timeout=1)

    async def close(self) -> None:
        await self.drain()
        self._ending = True
        if self._lost.is_set():
            return
        with suppress(nats.errors.Error, asyncio.TimeoutError):
            async with asyncio.timeout(5):
                await self._broker.stop()

    async def _closed(self) -> None:
        for subscriber in self._subscribers:
            subscriber.running = False
        if not self._ending:
            self._lost.set()

    async def _stop_pulling(self, subscriber: Any) -> None:
        """Messages that were on their way still reach the (refusing) delivery: the inbox is drained
        before the loop ends, else they would wait for their ack wait."""
        pull, client = subscriber.subscription, self._broker.connection
        if pull is None:
            return
        with suppress(nats.errors.Error, TimeoutError):
            await client._send_unsubscribe(pull._sub._id)
            await client.flush(timeout=1)
            for _ in range(_LAST_LOOKS):
                await asyncio.sleep(0.01)
                if not pull.pending_msgs:
                    break
        subscriber.running = False

    def _js(self) -> Any:
        return self._broker.config.connection_state.stream
