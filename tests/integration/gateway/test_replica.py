"""A gateway and a serving replica over real HTTP and a real bus: clients that hang up, and what is resident."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.bus import Bus, Table, table_for
from tests.gateway_world import World
from tests.gateway_world import world as running_world
from tests.serving_kit import BASE_NAME, BASE_TOKEN, VOCABULARY, Stage, make_base, until
from tests.unit.gateway.kit import byte_codec

PROMPT = [5, 6, 7]
END = VOCABULARY - 1
FOREVER: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 400, "logit_bias": {str(END): -100}}


@pytest.fixture
def bus_table() -> Table:
    return table_for((BASE_TOKEN,))


@pytest.fixture
async def world(tmp_path: Path, bus: Bus) -> AsyncIterator[World]:
    stage = Stage(tmp_path, make_base(tmp_path / "base"), bus=bus)
    await stage.add("acme/adder@1")
    await stage.add("beta/secret@1")
    codec = byte_codec()
    codec.eos_ids = (END,)
    async with running_world(stage, codec) as found:
        yield found


@pytest.mark.parametrize("model", [BASE_NAME, "acme/adder@1"])
async def test_leaving_a_stream_ends_its_generation_in_the_engine(world: World, model: str) -> None:
    """While the gate holds the engine back, nothing can end but by being given up."""
    async with world.client() as client:
        world.stage.controls.token_gate.clear()
        stream = await client.completions.create(model=model, stream=True, n=3, **FOREVER)
        await anext(aiter(stream))
        await until(lambda: world.replica.sampler.in_flight == 3)
        assert (await world.residency())["in_flight"] == 3
        await stream.close()
        await world.idle()
    assert not world.stage.controls.token_gate.is_set()


async def test_giving_up_on_a_whole_answer_ends_its_generation_in_the_engine(world: World) -> None:
    async with world.client() as client:
        world.stage.controls.token_gate.clear()
        asking = asyncio.create_task(client.completions.create(model="acme/adder@1", **FOREVER))
        await until(lambda: [entry.holds for entry in world.replica.residency.residents()] == [1])
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await world.idle()
    assert not world.stage.controls.token_gate.is_set()
    assert [entry.holds for entry in world.replica.residency.residents()] == [0]


async def test_the_tiers_are_the_replicas_own_and_a_tenants_are_its_policies(world: World) -> None:
    async with world.client() as client:
        for model in ("acme/adder@1", "beta/secret@1"):
            await client.completions.create(model=model, prompt=PROMPT, max_tokens=1)
    digests = {name: view.adapter_sha256 for name, view in world.stage.catalog.views.items()}
    everything = await world.residency()
    memory = {entry["revision"]: entry["adapter_sha256"] for entry in everything["memory"]}
    assert memory == digests
    assert set(everything["slot"]) <= digests.keys()
    assert set(digests.values()) <= set(everything["disk"])
    for key, own, other in (("key-acme", "acme/adder@1", "beta/"), ("key-beta", "beta/secret@1", "acme/")):
        seen = await world.residency(key)
        assert [entry["revision"] for entry in seen["memory"]] == [own]
        assert other not in str(seen)
        assert "disk" not in seen


async def test_a_replicas_proof_is_in_the_headers(world: World) -> None:
    async with world.client("key-acme") as client:
        raw = await client.completions.with_raw_response.create(model="acme/adder@1", prompt=PROMPT, max_tokens=2)
    assert raw.headers["mint-revision"] == "acme/adder@1"
    assert raw.headers["mint-adapter-sha256"] == world.stage.catalog.views["acme/adder@1"].adapter_sha256
    assert raw.parse().model == "acme/adder@1"
