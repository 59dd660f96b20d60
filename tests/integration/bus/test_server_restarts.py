"""What a nats-server that stops, stalls or dies may not cost: no message twice, none lost, no connection."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

import psutil
import pytest
from mint_schemas import RunStateChanged

from shared.bus import CATALOG_EVENTS, Bus, Received
from tests.integration.bus.helpers import eventually, jetstream, reconnected, waiting
from tests.servers import NatsServer


def _fact(number: int) -> RunStateChanged:
    return RunStateChanged(
        run_id=f"r{number}", policy="acme/adder", base="tiny/llama", state="running", previous="queued"
    )


async def _publish(bus: Bus, number: int) -> bool:
    """Whether the stream had it already."""
    fact = _fact(number)
    stored = await bus.publish("mint.v1.run.running", fact.run_id, "mint/catalog", "tiny-llama", fact)
    return stored.duplicate


@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_a_retry_after_a_restart_is_stored_once(bus: Bus, nats_server: NatsServer, end: str) -> None:
    """nats.py#504, nats.py#354: the answer to a publish was lost with the server; the same id comes again."""
    assert not await _publish(bus, 1)
    await asyncio.to_thread(getattr(nats_server, end))
    await asyncio.to_thread(nats_server.start)
    await eventually(lambda: reconnected(bus), 10)
    assert await _publish(bus, 1)
    assert await waiting(bus, "EVENTS") == 1


async def test_what_was_acknowledged_is_there_after_a_kill(
    make_bus: Callable[[], Bus], nats_server: NatsServer
) -> None:
    """nats-server#7564: acknowledged writes, and the consumers' table with them, survive a SIGKILL."""
    bus = make_bus()
    await bus.connect()
    acknowledged = [number for number in range(100) if not await _publish(bus, number)]
    await asyncio.to_thread(nats_server.restart)
    await eventually(lambda: reconnected(bus), 10)
    await bus.check()
    assert await waiting(bus, "EVENTS") == len(acknowledged) == 100
    stored = [await jetstream(bus).get_msg("EVENTS", seq=number + 1) for number in range(100)]
    assert [message.headers["ce-id"] for message in stored] == [f"r{number}" for number in acknowledged]


async def test_a_server_that_stalls_for_a_second_is_waited_for(bus: Bus, nats_server: NatsServer) -> None:
    """The framework's own patience of half a second would make a failure of every slow disk."""
    process = nats_server._process
    assert process is not None
    await _publish(bus, 1)
    process.send_signal(signal.SIGSTOP)
    await eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    try:
        publishing = asyncio.create_task(_publish(bus, 2))
        await asyncio.sleep(1.5)
        assert not publishing.done()
    finally:
        process.send_signal(signal.SIGCONT)
    assert not await asyncio.wait_for(publishing, 5)
    assert await waiting(bus, "EVENTS") == 2


async def test_reconnecting_has_no_end(bus: Bus) -> None:
    """A client that gives up after some attempts leaves a pull loop that spins and blocks the event loop."""
    assert bus._broker.connection.options["max_reconnect_attempts"] == -1


@pytest.mark.slow
async def test_consumed_after_an_outage_longer_than_sixty_attempts(bus: Bus, nats_server: NatsServer) -> None:
    seen: list[str] = []

    async def handle(received: Received) -> None:
        seen.append(received.envelope.id)

    await bus.consume(CATALOG_EVENTS, handle)
    await asyncio.to_thread(nats_server.kill)
    for _ in range(80):
        began = time.monotonic()
        await asyncio.sleep(0.5)
        assert time.monotonic() - began < 5.0, "something holds the event loop"
    await asyncio.to_thread(nats_server.start)
    await eventually(lambda: reconnected(bus), 10)
    await _publish(bus, 1)
    await eventually(lambda: seen == ["r1"], 10)
