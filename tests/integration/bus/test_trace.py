"""One trace through publish → consume → publish → consume (nats-server#7564: broken traces)."""

from __future__ import annotations

from mint_schemas import RunStateChanged

from shared.bus import CATALOG_EVENTS, Bus, Received
from shared.telemetry import current_traceparent, span
from tests.integration.bus.helpers import DURABLE, TOKEN, eventually, send


async def test_one_trace_across_two_hops(bus: Bus) -> None:
    seen: list[tuple[str | None, str | None]] = []
    fact = RunStateChanged(run_id="r1", policy="acme/adder", base="tiny/llama", state="running", previous="queued")

    async def work(received: Received) -> None:
        seen.append((received.envelope.traceparent, current_traceparent()))
        await bus.publish("mint.v1.run.running", "r1", "mint/evaluator", TOKEN, fact)

    async def see(received: Received) -> None:
        seen.append((received.envelope.traceparent, current_traceparent()))

    await bus.consume(DURABLE, work)
    await bus.consume(CATALOG_EVENTS, see)
    with span("a request"):
        origin = current_traceparent()
        await send(bus)
    await eventually(lambda: len(seen) == 2)
    carried = [origin, *(each for pair in seen for each in pair)]
    assert len({(each or "").split("-")[1] for each in carried}) == 1
    assert len({(each or "").split("-")[2] for each in carried}) == 5


async def test_an_explicit_parent_wins(bus: Bus) -> None:
    """An outbox row is relayed under the trace that it was written in, not the relay's."""
    seen: list[str | None] = []

    async def see(received: Received) -> None:
        seen.append(received.envelope.traceparent)

    fact = RunStateChanged(run_id="r1", policy="acme/adder", base="tiny/llama", state="running", previous="queued")
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    await bus.consume(CATALOG_EVENTS, see)
    with span("the relay"):
        await bus.publish("mint.v1.run.running", "r1", "mint/catalog", TOKEN, fact, traceparent=parent)
    await eventually(lambda: len(seen) == 1)
    assert (seen[0] or "").split("-")[1] == "a" * 32
