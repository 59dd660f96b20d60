"""The engine dies: requests are answered at once, it comes back, and its working set with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.serving.errors import EngineDown, LoadFailed, Problem
from shared.engine.port import ResidentAdapter
from shared.errors import Fatal
from tests.serving_kit import Stage, ask, make_base, running, tokens, until


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, make_base(tmp_path / "base"))


async def test_a_killed_engine_is_restarted_with_its_working_set_and_nobody_registers_again(stage: Stage) -> None:
    """aibrix#236, aibrix#1819."""
    for number in (1, 2):
        await stage.add(f"acme/adder@{number}")
    await stage.desire("acme/adder@1", pinned=("acme/adder@1",))
    async with running(stage.replica()) as replica:
        before = [await tokens(replica, ask(f"acme/adder@{n}")) for n in (1, 2)]
        boot, desired_writes = replica.supervisor.boot_id, stage.bus.kv("residency").revision
        stage.controls.engines[-1].die()
        await until(lambda: len(stage.controls.engines) == 2)
        await until(lambda: replica.healthy() is None)
        resident = {adapter.revision: adapter.pinned for adapter in await stage.controls.engines[-1].resident()}
        assert resident == {"acme/adder@1": True, "acme/adder@2": False}
        assert [await tokens(replica, ask(f"acme/adder@{n}")) for n in (1, 2)] == before
        assert stage.bus.kv("residency").revision == desired_writes
        assert replica.supervisor.boot_id != boot
        await until(lambda: len(stage.bus.published) == 4)
    assert stage.controls.loads == {"acme/adder@1": 2, "acme/adder@2": 2}


async def test_while_the_engine_is_away_requests_are_answered_and_not_left_waiting(stage: Stage) -> None:
    await stage.add("acme/adder@1")
    async with running(stage.replica()) as replica:
        await tokens(replica, ask("acme/adder@1"))
        stage.controls.start_failures = 1_000_000
        stage.controls.engines[-1].die()
        await until(lambda: replica.healthy() is not None)
        for revision in (None, "acme/adder@1", "acme/adder@2"):
            with pytest.raises(EngineDown) as down:
                await asyncio.wait_for(tokens(replica, ask(revision)), 0.5)
            assert (down.value.status, bool(down.value.retry_after_s)) == (503, True)
        announced = replica.status.replica()
        assert announced is not None
        assert announced.ready == ()
        await until(lambda: "no memory for the engine" in str(replica.healthy()))
        stage.controls.start_failures = 0
        await until(lambda: replica.healthy() is None)
        assert await tokens(replica, ask("acme/adder@1"))


async def test_requests_in_flight_end_with_an_error_when_the_engine_dies(stage: Stage) -> None:
    await stage.add("acme/adder@1")
    async with running(stage.replica()) as replica:
        sampling = await replica.sampler.open(ask("acme/adder@1", max_tokens=100))
        stage.controls.token_gate.clear()
        await anext(sampling.chunks)
        stage.controls.engines[-1].die()
        stage.controls.token_gate.set()
        with pytest.raises(EngineDown):
            async for _ in sampling.chunks:
                pass
        await sampling.close()
        await until(lambda: replica.healthy() is None)
        assert replica.sampler.in_flight == 0


async def test_an_adapter_that_kills_the_engine_twice_is_given_up(stage: Stage) -> None:
    await stage.add("acme/adder@1")
    await stage.add("acme/adder@2")
    await stage.desire("acme/adder@1", "acme/adder@2")
    stage.controls.kills = {"acme/adder@1"}
    async with running(stage.replica()) as replica:
        assert await tokens(replica, ask("acme/adder@2"))
        with pytest.raises(LoadFailed, match="ended the engine 2 times"):
            await tokens(replica, ask("acme/adder@1"))
    assert stage.controls.loads["acme/adder@1"] == 2
    assert len(stage.controls.engines) == 3


async def test_an_engine_that_does_not_start_is_tried_again_and_the_reason_is_told(stage: Stage) -> None:
    stage.controls.start_failures = 3
    async with running(stage.replica(), healthy=False) as replica:
        await until(lambda: "no memory for the engine" in str(replica.healthy()))
        assert replica.status.replica() is None
        await until(lambda: replica.healthy() is None)


async def test_one_directory_has_one_replica(stage: Stage) -> None:
    async with running(stage.replica()):
        with pytest.raises(Fatal, match="MINT_SERVING_REPLICA"):
            await stage.replica().start()
    async with running(stage.replica()):
        pass


async def test_shutdown_answers_those_who_wait(stage: Stage) -> None:
    await stage.add("acme/adder@1")
    stage.controls.load_gate.clear()
    async with running(stage.replica()) as replica:
        waiting = asyncio.create_task(tokens(replica, ask("acme/adder@1")))
        await until(lambda: stage.controls.loads)
    with pytest.raises(Problem, match="shutting down"):
        await waiting
    assert stage.bus.kv("replicas").values == {}


async def test_an_engine_that_contradicts_itself_once_is_kept_and_twice_is_restarted(stage: Stage) -> None:
    async with running(stage.replica()) as replica:
        stage.controls.doubts = 1
        await until(lambda: not stage.controls.doubts)
        await asyncio.sleep(0.1)
        assert len(stage.controls.engines) == 1
        stage.controls.doubts = 2
        await until(lambda: len(stage.controls.engines) == 2)
        await until(lambda: replica.healthy() is None)


async def test_an_engine_that_raises_anything_is_still_watched(stage: Stage) -> None:
    """vLLM's worker answers a failed call with a bare Exception; the watch and the gauges go on."""

    async def broken() -> list[ResidentAdapter]:
        raise RuntimeError("Call to list_loras method failed")

    async with running(stage.replica()) as replica:
        stage.controls.engines[-1].resident = broken  # type: ignore[method-assign]
        assert (await replica.status.report())["memory"] == []
        await until(lambda: len(stage.controls.engines) == 2)
        await until(lambda: replica.healthy() is None)
        assert await tokens(replica, ask())
