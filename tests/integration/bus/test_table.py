"""What exists equals the table: made by the provisioner, compared by services, changed by nobody else."""

from __future__ import annotations

import nats
import pytest
from nats.js import api

from shared.bus import Bus, Received, table_for
from shared.bus.check import differences
from shared.bus.provisioner import provision
from shared.errors import Fatal
from tests.conftest import TOKENS
from tests.integration.bus.helpers import DURABLE, eventually, jetstream, send, waiting
from tests.servers import NatsServer


async def test_provisioner_creates_the_table_and_may_run_again(nats_server: NatsServer) -> None:
    client = await nats.connect(nats_server.url)
    js = client.jetstream()
    table = table_for(TOKENS)
    assert len(await differences(js, table)) == len(table.streams) + len(table.buckets) + len(table.durables)
    await provision(js, table)
    await provision(js, table)
    assert await differences(js, table) == []
    commands = (await js.stream_info("COMMANDS")).config
    assert (commands.retention, commands.discard) == (api.RetentionPolicy.WORK_QUEUE, api.DiscardPolicy.NEW)
    assert (await js.stream_info("EVENTS")).config.max_age == 30 * 86400
    assert (await js.consumer_info("COMMANDS", DURABLE)).config.max_deliver == 100
    await client.close()


async def test_service_refuses_a_consumer_that_differs(bus: Bus) -> None:
    """faststream#1598: an existing durable silently ignores a changed configuration."""
    config = (await jetstream(bus).consumer_info("COMMANDS", DURABLE)).config
    await jetstream(bus).add_consumer("COMMANDS", config=config.evolve(ack_wait=7.0))
    with pytest.raises(Fatal, match=rf"durable {DURABLE} on COMMANDS: ack_wait is 7.0, the table says 30.0"):
        await bus.check()
    await provision(jetstream(bus), bus.table)
    await bus.check()


async def test_service_refuses_a_bus_that_was_not_provisioned(nats_server: NatsServer) -> None:
    bus = Bus(nats_server.url, table_for(["tiny-llama"]))
    await bus.connect()
    with pytest.raises(Fatal, match="stream COMMANDS does not exist"):
        await bus.check()
    await bus.close()


async def test_consuming_changes_nothing_on_the_server(bus: Bus) -> None:
    """A framework that declares streams for its subscribers rewrites their settings."""

    async def handle(received: Received) -> None:
        return None

    await bus.consume(DURABLE, handle)
    await send(bus)
    await bus.check()
    await bus.connect()
    await bus.check()


async def test_provisioning_anew_keeps_messages_and_positions(bus: Bus) -> None:
    seen: list[str] = []

    async def handle(received: Received) -> None:
        seen.append(received.envelope.id)

    await send(bus, 1)
    wider = table_for([*TOKENS, "another-base"], ack_wait_s=11)
    await provision(jetstream(bus), wider)
    assert await differences(jetstream(bus), wider) == []
    assert await waiting(bus) == 1
    await bus.consume(DURABLE, handle)
    await eventually(lambda: seen == ["r1:evaluation"])


async def test_a_change_that_the_server_refuses_is_named(bus: Bus) -> None:
    await jetstream(bus).delete_stream("COMMANDS")
    await jetstream(bus).add_stream(name="COMMANDS", subjects=["mint.v1.train.requested.*"])
    with pytest.raises(Fatal, match="the bus refuses the table's stream COMMANDS"):
        await provision(jetstream(bus), bus.table)
