"""The working set: desired first, holds respected, room made from what nobody needs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from services.serving.errors import LoadFailed, QueueFull
from shared.residency import REPLICAS_BUCKET, Replica
from shared.sampling.port import BACKGROUND, INTERACTIVE
from shared.telemetry.metrics import HOLDS, REGISTRY
from tests.serving_kit import Stage, ask, make_base, running, tokens, until


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, make_base(tmp_path / "base"))


def _ready(stage: Stage) -> list[str]:
    value = stage.bus.kv(REPLICAS_BUCKET).values.get(f"{stage.base.token}.{stage.name}")
    return [] if value is None else [ready.revision for ready in Replica.model_validate_json(value).ready]


async def test_what_is_desired_is_loaded_by_priority_before_the_replica_is_healthy(stage: Stage) -> None:
    for number in (1, 2, 3):
        await stage.add(f"acme/adder@{number}")
    await stage.desire("acme/adder@3", "acme/adder@1", "acme/adder@2")
    stage.controls.load_gate.clear()
    async with running(stage.replica(fetches=1), healthy=False) as replica:
        await until(lambda: stage.controls.loads)
        assert "acme/adder@3" in str(replica.healthy())
        assert _ready(stage) == []
        stage.controls.load_gate.set()
        await until(lambda: replica.healthy() is None)
        assert list(stage.controls.loads) == ["acme/adder@3", "acme/adder@1", "acme/adder@2"]
        await until(lambda: sorted(_ready(stage)) == ["acme/adder@1", "acme/adder@2", "acme/adder@3"])
    assert _ready(stage) == []


async def test_a_desired_revision_that_cannot_load_is_reported_and_the_others_serve(stage: Stage) -> None:
    """dynamo#8630, sglang#7808: a failing load of a new revision leaves the old one serving."""
    await stage.add("acme/adder@1")
    await stage.add("acme/adder@2", base_sha256="f" * 64)
    await stage.desire("acme/adder@1")
    async with running(stage.replica()) as replica:
        before = await tokens(replica, ask("acme/adder@1"))
        await stage.desire("acme/adder@2", "acme/adder@1")
        await until(lambda: replica.residency.failures.given_up())
        assert replica.healthy() is None
        assert await tokens(replica, ask("acme/adder@1")) == before
        await until(lambda: _ready(stage) == ["acme/adder@1"])
        with pytest.raises(LoadFailed):
            await tokens(replica, ask("acme/adder@2"))


async def test_a_replica_waits_for_a_catalog_that_boots_later(stage: Stage) -> None:
    await stage.add("acme/adder@1")
    await stage.desire("acme/adder@1")
    stage.catalog.down = True
    async with running(stage.replica(), healthy=False) as replica:
        await until(lambda: stage.catalog.asked["acme/adder@1"] >= 3)
        assert "acme/adder@1" in str(replica.healthy())
        stage.catalog.down = False
        await until(lambda: replica.healthy() is None)
        assert stage.controls.loads == {"acme/adder@1": 1}


async def test_what_is_no_longer_desired_stays_until_its_room_is_needed(stage: Stage) -> None:
    for number in (1, 2, 3):
        await stage.add(f"acme/adder@{number}")
    await stage.desire("acme/adder@1")
    async with running(stage.replica(capacity=2)) as replica:
        await stage.desire("acme/adder@2")
        await until(lambda: stage.controls.loads["acme/adder@2"])
        await tokens(replica, ask("acme/adder@1"))
        assert stage.controls.unloads == {}
        await stage.desire("acme/adder@3", "acme/adder@2")
        await until(lambda: stage.controls.loads["acme/adder@3"])
        await until(lambda: not replica.residency.missing())
    assert stage.controls.unloads == {"acme/adder@1": 1}


async def test_room_is_made_from_the_least_recently_used_and_never_from_a_pinned_one(stage: Stage) -> None:
    for number in (1, 2, 3, 4):
        await stage.add(f"acme/adder@{number}")
    await stage.desire("acme/adder@1", pinned=("acme/adder@1",))
    async with running(stage.replica(capacity=3)) as replica:
        for number in (2, 3, 2, 4):
            await tokens(replica, ask(f"acme/adder@{number}"))
        resident = {adapter.revision: adapter.pinned for adapter in await stage.controls.engines[-1].resident()}
    assert stage.controls.unloads == {"acme/adder@3": 1}
    assert resident == {"acme/adder@1": True, "acme/adder@2": False, "acme/adder@4": False}


async def test_one_place_stays_unpinned_whatever_is_desired(stage: Stage) -> None:
    for number in (1, 2, 3):
        await stage.add(f"acme/adder@{number}")
    await stage.desire("acme/adder@1", "acme/adder@2", pinned=("acme/adder@1", "acme/adder@2"))
    async with running(stage.replica(capacity=2)) as replica:
        assert await tokens(replica, ask("acme/adder@3"))
    assert stage.controls.unloads == {"acme/adder@2": 1}


async def test_a_pinned_revision_that_fits_no_more_makes_room_for_what_is_more_urgent(stage: Stage) -> None:
    old = [f"acme/old@{number}" for number in (1, 2, 3)]
    new = [f"acme/new@{number}" for number in (1, 2)]
    for revision in (*old, *new):
        await stage.add(revision)
    await stage.desire(*old, pinned=tuple(old))
    async with running(stage.replica(capacity=3)) as replica:
        await stage.desire(*new, *old, pinned=tuple(old))
        await until(lambda: {*new, old[0]} == {entry.revision for entry in replica.residency.residents()})
        await asyncio.sleep(0.1)
    assert stage.controls.loads == dict.fromkeys((*old, *new), 1)


async def test_a_revision_in_use_is_never_unloaded(stage: Stage) -> None:
    """trl#7017: the requests in flight finish on the revision that they started with."""
    await stage.add("acme/adder@1")
    await stage.add("acme/adder@2")
    async with running(stage.replica(capacity=1)) as replica:
        quiet = await tokens(replica, ask("acme/adder@1", max_tokens=12))
        sampling = await replica.sampler.open(ask("acme/adder@1", max_tokens=12))
        cold = asyncio.create_task(tokens(replica, ask("acme/adder@2")))
        await until(lambda: replica.residency.residents()[0].draining)
        await asyncio.sleep(0.05)
        assert stage.controls.unloads == {}
        found: list[int] = []
        async for chunk in sampling.chunks:
            found += chunk.token_ids
        await sampling.close()
        assert tuple(found) == quiet
        assert await cold
    assert stage.controls.unloads == {"acme/adder@1": 1}


async def test_a_busy_revision_cannot_keep_a_cold_one_out(stage: Stage) -> None:
    """sglang#15129, vllm#16876: one place, A asked without a pause → B within a fixed bound."""
    await stage.add("acme/a@1")
    await stage.add("acme/b@1")
    async with running(stage.replica(capacity=1)) as replica:
        first = await tokens(replica, ask("acme/a@1"))
        answered: list[str] = []

        async def keep_asking() -> None:
            while "b" not in answered:
                assert await tokens(replica, ask("acme/a@1")) == first
                answered.append("a")

        async def ask_once() -> None:
            await tokens(replica, ask("acme/b@1"))
            answered.append("b")

        hot = [asyncio.create_task(keep_asking()) for _ in range(8)]
        await until(lambda: len(answered) > 8)
        async with asyncio.timeout(5):
            await ask_once()
        await asyncio.gather(*hot)
    assert stage.controls.unloads["acme/a@1"] == 1


async def test_when_every_place_stays_in_use_a_cold_load_is_told_to_come_back(stage: Stage) -> None:
    await stage.add("acme/adder@1")
    await stage.add("acme/adder@2")
    async with running(stage.replica(capacity=1, room_wait_s=0.1)) as replica:
        sampling = await replica.sampler.open(ask("acme/adder@1", max_tokens=400))
        with pytest.raises(QueueFull, match="pinned or in use"):
            await tokens(replica, ask("acme/adder@2"))
        assert await tokens(replica, ask("acme/adder@1"))
        await sampling.close()
        assert await tokens(replica, ask("acme/adder@2"))


async def test_requests_in_flight_are_untouched_by_loads(stage: Stage) -> None:
    """vllm#47724: A1 and A2 generate while A3 and A4 load → tokens equal a quiet run's."""
    for number in (1, 2, 3, 4):
        await stage.add(f"acme/adder@{number}")
    async with running(stage.replica()) as replica:
        quiet = [await tokens(replica, ask(f"acme/adder@{n}", max_tokens=200)) for n in (1, 2)]
        base = await tokens(replica, ask(max_tokens=200))
        busy = [asyncio.create_task(tokens(replica, ask(f"acme/adder@{n}", max_tokens=200))) for n in (1, 2)]
        plain = asyncio.create_task(tokens(replica, ask(max_tokens=200)))
        await until(lambda: replica.sampler.in_flight == 3)
        loading = [asyncio.create_task(tokens(replica, ask(f"acme/adder@{n}"))) for n in (3, 4)]
        assert await asyncio.gather(*busy) == quiet
        assert await plain == base
        assert len(set(await asyncio.gather(*loading))) == 2
    assert quiet[0] != quiet[1]
    assert base not in quiet


async def test_200_loads_and_unloads_leave_the_resident_list_bounded(stage: Stage) -> None:
    """vllm#54839, vllm#42633."""
    for number in range(1, 6):
        await stage.add(f"acme/adder@{number}")
    async with running(stage.replica(capacity=2)) as replica:
        answers: dict[int, tuple[int, ...]] = {}
        for turn in range(200):
            number = turn % 5 + 1
            found = await tokens(replica, ask(f"acme/adder@{number}", max_tokens=2))
            assert answers.setdefault(number, found) == found
        resident = await stage.controls.engines[-1].resident()
        assert len(resident) == len(replica.residency.residents()) == 2
        assert all(entry.holds == 0 for entry in replica.residency.residents())


async def test_an_idle_resident_is_listed_and_counted_like_a_busy_one(stage: Stage) -> None:
    """llm-d-router#2605: the metric shows residency, not activity."""
    manifest = await stage.add("acme/adder@1")
    await stage.desire("acme/adder@1")
    async with running(stage.replica()) as replica:
        await replica.status.measure()
        report = await replica.status.report()
        metrics = generate_latest(REGISTRY).decode()
    assert [adapter["revision"] for adapter in report["memory"]] == ["acme/adder@1"]
    assert report["memory"][0]["in_flight"] == 0
    assert report["disk"] == [manifest.adapter_sha256]
    assert f'mint_revisions_resident{{base="{stage.base.name}",tier="memory"}} 1.0' in metrics
    assert f'mint_samples_in_flight{{base="{stage.base.name}"}} 0.0' in metrics


async def test_a_revision_that_the_engine_dropped_by_itself_is_loaded_again(stage: Stage) -> None:
    await stage.add("acme/adder@1")
    async with running(stage.replica()) as replica:
        first = await tokens(replica, ask("acme/adder@1"))
        await stage.controls.engines[-1].unload("acme/adder@1")
        assert await tokens(replica, ask("acme/adder@1")) == first
    assert stage.controls.loads == {"acme/adder@1": 2}


async def test_holds_are_counted_by_the_tier_that_the_revision_was_found_in(stage: Stage) -> None:
    await stage.add("acme/adder@1")
    await stage.add("acme/adder@2")
    base = stage.base.name
    before = {tier: HOLDS.labels(base, tier)._value.get() for tier in ("slot", "memory", "disk", "catalog")}
    async with running(stage.replica(capacity=1)) as replica:
        for number in (1, 1, 2, 1):
            await tokens(replica, ask(f"acme/adder@{number}"))
        replica.residency.reconcile([], [])
        await tokens(replica, ask("acme/adder@1"))
    after = {tier: HOLDS.labels(base, tier)._value.get() for tier in before}
    assert {tier: after[tier] - before[tier] for tier in before} == {"slot": 1, "memory": 1, "disk": 1, "catalog": 2}


async def test_what_the_engine_lists_no_more_leaves_the_announcement_and_what_came_meanwhile_stays(
    stage: Stage,
) -> None:
    await stage.add("acme/adder@1")
    await stage.add("acme/adder@2")
    async with running(stage.replica()) as replica:
        await tokens(replica, ask("acme/adder@1"))
        before = replica.residency.residents()
        await tokens(replica, ask("acme/adder@2"))
        replica.residency.reconcile(before, [])
        assert [entry.revision for entry in replica.residency.residents()] == ["acme/adder@2"]
        await stage.controls.engines[-1].unload("acme/adder@2")
        await replica.status.measure()
        assert replica.residency.residents() == []


async def test_the_announcement_and_the_report_tell_loads_and_who_waits(stage: Stage) -> None:
    await stage.add("acme/adder@1")
    await stage.add("acme/adder@2")
    async with running(stage.replica()) as replica:
        stage.controls.load_gate.clear()
        asking = [asyncio.create_task(tokens(replica, ask("acme/adder@1"))) for _ in range(2)]
        await until(lambda: stage.controls.loads)
        asking.append(asyncio.create_task(tokens(replica, ask("acme/adder@2", priority=BACKGROUND))))
        await until(lambda: replica.residency.queue.stages()["fetched"])
        announced = replica.status.replica()
        report = await replica.status.report()
        await replica.status.measure()
        metrics = generate_latest(REGISTRY).decode()
        stage.controls.load_gate.set()
        await asyncio.gather(*asking)
    assert announced is not None
    assert (announced.in_flight, announced.waiting, announced.loads) == (3, 3, 2)
    assert (announced.structured_output, announced.tools) == (False, False)
    assert report["loads"] == [
        {
            "revision": "acme/adder@1",
            "stage": "activating",
            "urgency": INTERACTIVE,
            "waiters": 2,
            "position": 1,
            "expected_wait_s": 1.0,
        },
        {
            "revision": "acme/adder@2",
            "stage": "fetched",
            "urgency": BACKGROUND,
            "waiters": 1,
            "position": 2,
            "expected_wait_s": 2.0,
        },
    ]
    assert f'mint_revision_loads_waiting{{base="{stage.base.name}"}} 1.0' in metrics
    assert f'mint_revision_loads_in_flight{{base="{stage.base.name}",stage="activating"}} 1.0' in metrics


async def test_what_is_desired_is_fetched_side_by_side(stage: Stage) -> None:
    revisions = [f"acme/adder@{number}" for number in (1, 2, 3, 4)]
    for revision in revisions:
        await stage.add(revision)
    await stage.desire(*revisions)
    stage.store.gate.clear()
    async with running(stage.replica(fetches=4), healthy=False) as replica:
        await until(lambda: replica.residency.queue.stages()["fetching"] == 4)
        stage.store.gate.set()
        await until(lambda: replica.healthy() is None)
    assert stage.controls.loads == dict.fromkeys(revisions, 1)
