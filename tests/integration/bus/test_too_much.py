"""Messages that are larger, deeper or stranger than ours ever are: one dead letter each, and the bus goes on."""

from __future__ import annotations

import asyncio
import json

import pytest
from mint_schemas import Envelope, EvaluationRequested, headers_for

from shared.bus import CATALOG_DEAD, Bus, Received, Table, table_for
from shared.errors import Fatal
from tests.integration.bus.helpers import DURABLE, SUBJECT, TYPE, empty, eventually, jetstream, send, waiting

MIB = 1024 * 1024


@pytest.fixture
def bus_table() -> Table:
    return table_for(["tiny-llama"], ack_wait_s=0.6, max_deliver=3)


def nested(depth: int) -> bytes:
    return ('{"a":' * depth + "1" + "}" * depth).encode()


@pytest.mark.parametrize(
    ("body", "extra", "reason"),
    [
        (json.dumps({"pad": "y" * (MIB - 600)}).encode(), {}, "less than 65536 is allowed; put the data into"),
        (b"{}", {"ce-subject": "s" * 65_000}, "command_id: is required"),
        (nested(900), {}, "nested more than 32 levels deep"),
        (nested(20_000 // 6), {}, "nested more than 32 levels deep"),
        (rb'{"command_id": "\ud800"}', {}, "half a character"),
    ],
)
async def test_one_dead_letter_and_the_bus_goes_on(bus: Bus, body: bytes, extra: dict[str, str], reason: str) -> None:
    """nats-server#7564, argo-events#2163: a dead letter with its reason must fit where the original did."""
    worked: list[str] = []

    async def work(received: Received) -> None:
        received.decode(EvaluationRequested)
        worked.append(received.envelope.id)

    dead: list[Received] = []

    async def bury(received: Received) -> None:
        dead.append(received)

    await bus.consume(DURABLE, work)
    await bus.consume(CATALOG_DEAD, bury)
    headers = headers_for(Envelope(type=TYPE, source="shop", id="odd")) | extra
    await jetstream(bus).publish(SUBJECT, body, headers=headers, stream="COMMANDS")
    await eventually(lambda: len(dead) == 1)
    (letter,) = dead
    assert reason in letter.dead_reason
    assert (letter.envelope.source, letter.envelope.id) == ("shop", "odd")
    assert len(letter.body) <= 65536
    assert letter.headers.get("mint-dead-size") == (str(len(body)) if len(body) > 65536 else None)
    await send(bus)
    await eventually(lambda: worked == ["r1:evaluation"])
    await eventually(lambda: empty(bus))
    assert await waiting(bus, "DEAD") == 1


async def test_a_connection_closed_for_good_is_told_and_nothing_spins(bus: Bus) -> None:
    """The client never connects again after a protocol error; the service must end, not starve."""

    async def work(received: Received) -> None:
        return None

    await bus.consume(DURABLE, work)
    lost = asyncio.create_task(bus.lost())
    # What the client does on the server's `-ERR`. Which one comes first after a real one, the error or the
    # end of the connection (which mends), is a matter of luck.
    await bus._broker.connection._process_err("'Maximum Payload Violation'")
    with pytest.raises(Fatal, match="closed the connection over an error of its client"):
        await asyncio.wait_for(lost, 5)
    await asyncio.sleep(0.3)
