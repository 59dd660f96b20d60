"""What slips past the middleware is announced by the server, buried, and taken off COMMANDS."""

from __future__ import annotations

import pytest

from shared.bus import CATALOG_DEAD, Advisory, Bus, Received, Table, table_for
from tests.integration.bus.helpers import DURABLE, SUBJECT, empty, eventually, jetstream, send, waiting


@pytest.fixture
def bus_table() -> Table:
    return table_for(["tiny-llama"], ack_wait_s=0.4, max_deliver=2)


async def test_max_deliveries_is_seen_and_buried(bus: Bus) -> None:
    """nats-server#5564: a worker that dies with the message each time, so that nobody answers."""
    told: list[Advisory] = []
    dead: list[Received] = []

    async def hear(advisory: Advisory) -> None:
        told.append(advisory)

    async def bury(received: Received) -> None:
        dead.append(received)

    await bus.advisories(hear)
    await bus.consume(CATALOG_DEAD, bury)
    await send(bus)
    pull = await jetstream(bus).pull_subscribe(SUBJECT, durable=DURABLE, stream="COMMANDS")
    for _ in range(2):
        await pull.fetch(1, timeout=3)
    with pytest.raises(TimeoutError):
        await pull.fetch(1, timeout=1)
    await pull.unsubscribe()
    await eventually(lambda: len(dead) == 1)
    await eventually(lambda: empty(bus))
    assert [(a.kind, a.durable, a.deliveries, a.buried) for a in told] == [("max_deliveries", DURABLE, 2, True)]
    assert dead[0].envelope.id == "r1:evaluation"
    assert dead[0].dead_reason == "delivered 2 times without an answer"


async def test_terminated_is_reported(bus: Bus) -> None:
    told: list[Advisory] = []

    async def hear(advisory: Advisory) -> None:
        told.append(advisory)

    await bus.advisories(hear)
    await send(bus)
    pull = await jetstream(bus).pull_subscribe(SUBJECT, durable=DURABLE, stream="COMMANDS")
    (message,) = await pull.fetch(1, timeout=3)
    await message.term()
    await eventually(lambda: len(told) == 1)
    await pull.unsubscribe()
    assert (told[0].kind, told[0].stream, told[0].buried) == ("terminated", "COMMANDS", False)
    assert await waiting(bus, "DEAD") == 0
