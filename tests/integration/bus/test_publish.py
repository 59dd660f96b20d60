"""Publishing to a real nats-server: stored once, checked, bounded, and never into the void."""

from __future__ import annotations

from collections.abc import Callable

import nats
import pytest
from mint_schemas import RunStateChanged

from shared.bus import Bus
from shared.bus.table import table_for
from shared.errors import Fatal, Retryable
from tests.servers import NatsServer

FACT = RunStateChanged(run_id="r1", policy="acme/adder", base="tiny/llama", state="running", previous="queued")


async def test_same_id_is_stored_once(bus: Bus) -> None:
    """nats.py#504, #354: a retry with the same id must not become a second fact."""
    first = await bus.publish("mint.v1.run.running", "r1", "mint/catalog", "tiny-llama", FACT)
    second = await bus.publish("mint.v1.run.running", "r1", "mint/catalog", "tiny-llama", FACT)
    other_source = await bus.publish("mint.v1.run.running", "r1", "mint/other", "tiny-llama", FACT)
    replay = await bus.publish("mint.v1.run.running", "r1", "mint/catalog", "tiny-llama", FACT, replay=1)
    assert (first.duplicate, second.duplicate, second.sequence) == (False, True, first.sequence)
    assert (other_source.duplicate, replay.duplicate) == (False, False)


async def test_no_stream_listening_is_an_error(nats_server: NatsServer) -> None:
    bus = Bus(nats_server.url, table_for(["tiny-llama"]))
    await bus.connect()
    with pytest.raises(Retryable, match=r"no stream listens on mint\.v1\.run\.running\.tiny-llama"):
        await bus.publish("mint.v1.run.running", "r1", "mint/catalog", "tiny-llama", FACT)
    await bus.close()


async def test_oversized_body_is_refused(bus: Bus) -> None:
    """argo-events#2163: 1 MB payloads. Batches go to the object store (claim check)."""
    body = FACT.model_copy(update={"policy": "x" * 64 * 1024})
    with pytest.raises(Fatal, match=r"65\d{3} bytes and less than 65536 is allowed; put the data into the object"):
        await bus.publish("mint.v1.run.running", "r1", "mint/catalog", "tiny-llama", body)


@pytest.mark.parametrize(
    ("type_", "body", "words"),
    [
        ("mint.v1.run.flying", {}, "known are"),
        ("mint.v1.run.running", {**FACT.model_dump(), "colour": 1}, "colour: there is no such field"),
        ("mint.v1.run.running", {"run_id": "r1"}, "policy: is required"),
        ("mint.v1.run.running", {**FACT.model_dump(), "previous": float("nan")}, "JSON compliant"),
    ],
)
async def test_broken_contracts_are_refused(bus: Bus, type_: str, body: dict[str, object], words: str) -> None:
    with pytest.raises(Fatal, match=words):
        await bus.publish(type_, "r1", "mint/catalog", "tiny-llama", body)


async def test_a_body_of_another_contract_is_refused(bus: Bus) -> None:
    with pytest.raises(Fatal, match="a body of ExportRequested is expected, not RunStateChanged"):
        await bus.publish("mint.v1.export.requested", "r1", "mint/catalog", "tiny-llama", FACT)


async def test_headers_are_cloudevents_in_binary_mode(bus: Bus, nats_server: NatsServer) -> None:
    await bus.publish("mint.v1.run.running", "r1|running", "mint/catalog", "tiny-llama", FACT, subject="acme/adder")
    client = await nats.connect(nats_server.url)
    message = await client.jetstream().get_msg("EVENTS", seq=1)
    await client.close()
    headers = message.headers or {}
    assert message.subject == "mint.v1.run.running.tiny-llama"
    assert RunStateChanged.model_validate_json(message.data or b"") == FACT
    assert headers["Nats-Msg-Id"] == "mint/catalog|r1|running"
    expected = {"ce-specversion": "1.0", "ce-id": "r1|running", "ce-source": "mint/catalog", "ce-subject": "acme/adder"}
    assert expected.items() <= headers.items()
    assert headers["content-type"] == "application/json"
    assert headers["traceparent"].startswith("00-")


async def test_bus_away_is_retryable_and_comes_back(make_bus: Callable[[], Bus], nats_server: NatsServer) -> None:
    bus = make_bus()
    await bus.connect()
    nats_server.kill()
    with pytest.raises(Retryable, match="did not confirm"):
        await bus.publish("mint.v1.run.running", "r1", "mint/catalog", "tiny-llama", FACT)
    assert not await bus.ping(0.2)
    nats_server.start()
    assert await bus.ping(10)
    await bus.publish("mint.v1.run.running", "r1", "mint/catalog", "tiny-llama", FACT)
