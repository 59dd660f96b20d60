"""A fact that no handler can take: one dead letter, and nothing stays pending or unacknowledged."""

from __future__ import annotations

import pytest
from mint_schemas import RunStateChanged

from shared.bus import CATALOG_EVENTS, Bus, Received, Table, table_for
from shared.errors import Fatal
from tests.integration.bus.helpers import eventually, jetstream, waiting


@pytest.fixture
def bus_table() -> Table:
    return table_for(["tiny-llama"], ack_wait_s=0.6, max_deliver=3)


@pytest.mark.parametrize("error", [RuntimeError("always"), Fatal("a fact of no run")])
async def test_a_poisoned_fact_leaves_nothing_pending(bus: Bus, error: Exception) -> None:
    """nats-server#5564: on EVENTS the facts stay stored, and the consumer is through with all of them."""
    taken: list[str] = []

    async def handle(received: Received) -> None:
        if received.envelope.id == "poison":
            raise error
        taken.append(received.envelope.id)

    async def through() -> bool:
        info = await jetstream(bus).consumer_info("EVENTS", CATALOG_EVENTS)
        return (info.num_pending, info.num_ack_pending) == (0, 0)

    await bus.consume(CATALOG_EVENTS, handle)
    for name in ("before", "poison", "after"):
        fact = RunStateChanged(run_id=name, policy="acme/a", base="tiny/llama", state="running", previous="queued")
        await bus.publish("mint.v1.run.running", name, "mint/catalog", "tiny-llama", fact)
    await eventually(lambda: taken == ["before", "after"])
    await eventually(through, 8)
    assert (await waiting(bus, "EVENTS"), await waiting(bus, "DEAD")) == (3, 1)
    letter = await jetstream(bus).get_msg("DEAD", seq=1)
    assert letter.headers["ce-id"] == "poison"
    assert str(error) in letter.headers["mint-dead-reason"]
