"""What leaves first, by last use and by steady use, and the memory tier's bounds."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from services.serving.errors import LoadFailed, QueueFull
from services.serving.eviction import REMEMBERED, Eviction, Frequency, Lru, make_eviction
from shared.engine.port import LoadReport
from tests.serving_kit import Stage, ask, make_base, running, tokens, until


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, make_base(tmp_path / "base"))


def _leaves_first(eviction: Eviction, *revisions: str) -> list[str]:
    return sorted(revisions, key=eviction.worth)


def test_by_last_use_the_oldest_leaves_first_and_the_unused_before_it() -> None:
    eviction = Lru()
    for revision in ("a", "b", "c", "a"):
        eviction.used(revision)
    assert _leaves_first(eviction, "a", "b", "c", "d") == ["d", "b", "c", "a"]


def test_by_frequency_a_single_touch_does_not_push_out_what_is_used_steadily() -> None:
    eviction = Frequency(half_life=1000)
    for revision in ("steady", "steady", "x", "y"):
        eviction.used(revision)
    assert _leaves_first(eviction, "steady", "x", "y", "unused") == ["unused", "x", "y", "steady"]


def test_by_frequency_uses_count_half_after_each_half_life() -> None:
    eviction = Frequency(half_life=100)
    for _ in range(8):
        eviction.used("old")
    before = eviction.worth("old")[0]
    for number in range(200):
        eviction.used(f"other{number}")
    assert eviction.worth("old")[0] == pytest.approx(before / 4)
    for _ in range(3):
        eviction.used("new")
    assert _leaves_first(eviction, "old", "new") == ["old", "new"]


def test_by_frequency_uses_are_remembered_over_an_eviction_and_bounded_in_number() -> None:
    eviction = Frequency(half_life=1e9)
    for number in range(REMEMBERED + 10):
        eviction.used(f"r{number}")
    assert eviction.worth("r9") == (0.0, 0)
    assert eviction.worth("r10")[0] == pytest.approx(1.0, abs=1e-4)


def test_by_frequency_more_of_zipf_distributed_touches_find_their_revision_resident() -> None:
    """1,000 revisions, 64 places, s = 0.9."""

    def hits(eviction: Eviction) -> int:
        draw, resident, found = random.Random(1), set[str](), 0
        weights = [1 / rank**0.9 for rank in range(1, 1001)]
        for number in draw.choices(range(1000), weights, k=6000):
            revision = f"r{number}"
            found += revision in resident
            if revision not in resident and len(resident) == 64:
                resident.remove(min(resident, key=eviction.worth))
            resident.add(revision)
            eviction.used(revision)
        return found

    assert hits(make_eviction("frequency", 64)) > 1.15 * hits(make_eviction("lru", 64))


def test_the_setting_names_the_policy() -> None:
    assert isinstance(make_eviction("lru", 4), Lru)
    assert isinstance(make_eviction("frequency", 4), Frequency)


@pytest.mark.parametrize(("eviction", "unloaded"), [("lru", "acme/hot@1"), ("frequency", "acme/cold@1")])
async def test_one_off_touches_push_out_the_hot_one_by_last_use_and_each_other_by_frequency(
    stage: Stage, eviction: str, unloaded: str
) -> None:
    for revision in ("acme/hot@1", "acme/cold@1", "acme/cold@2"):
        await stage.add(revision)
    async with running(stage.replica(capacity=2, eviction=eviction)) as replica:
        for revision in ("acme/hot@1", "acme/hot@1", "acme/hot@1", "acme/cold@1", "acme/cold@2"):
            await tokens(replica, ask(revision))
    assert stage.controls.unloads == {unloaded: 1}


async def test_the_memory_tier_is_bounded_by_bytes(stage: Stage) -> None:
    manifests = [await stage.add(f"acme/adder@{number}") for number in (1, 2, 3, 4)]
    size = max(manifest.adapter_bytes for manifest in manifests)
    async with running(stage.replica(capacity=4, memory_bytes=2 * size)) as replica:
        for number in (1, 2, 3, 1, 4):
            await tokens(replica, ask(f"acme/adder@{number}"))
            assert replica.residency.memory.bytes() <= 2 * size
        resident = {adapter.revision for adapter in await stage.controls.engines[-1].resident()}
    assert resident == {"acme/adder@1", "acme/adder@4"}


async def test_pinned_revisions_leave_room_in_bytes_for_a_cold_load(stage: Stage) -> None:
    """The least urgent pinned one goes, and nothing else."""
    manifests = [await stage.add(f"acme/adder@{number}") for number in (1, 2, 3)]
    size = max(manifest.adapter_bytes for manifest in manifests)
    pinned = ("acme/adder@1", "acme/adder@2")
    await stage.desire(*pinned, pinned=pinned)
    async with running(stage.replica(capacity=4, memory_bytes=2 * size)) as replica:
        assert await tokens(replica, ask("acme/adder@3"))
        assert stage.controls.unloads == {"acme/adder@2": 1}


async def test_what_is_desired_beyond_the_bytes_of_the_tier_does_not_keep_the_replica_busy(stage: Stage) -> None:
    """Three are desired, two fit: the two most urgent end up resident, and the replica is healthy."""
    revisions = [f"acme/adder@{number}" for number in (1, 2, 3)]
    size = max([(await stage.add(revision)).adapter_bytes for revision in revisions])
    await stage.desire(*revisions, pinned=tuple(revisions))
    async with running(stage.replica(capacity=4, memory_bytes=2 * size)) as replica:
        assert {entry.revision for entry in replica.residency.residents()} == set(revisions[:2])
        assert replica.residency.missing() == []


async def test_an_adapter_larger_than_the_memory_tier_is_refused_before_a_byte_is_fetched(stage: Stage) -> None:
    await stage.add("acme/adder@1")
    async with running(stage.replica(memory_bytes=100)) as replica:
        with pytest.raises(LoadFailed, match="MINT_SERVING_MEMORY_BYTES"):
            await tokens(replica, ask("acme/adder@1"))
    assert not stage.store.fetched


async def test_loads_side_by_side_never_share_a_place(stage: Stage) -> None:
    """One place is free and two loads are in the engine at once: the second waits for a place of its own."""
    for number in (1, 2, 3):
        await stage.add(f"acme/adder@{number}")
    async with running(stage.replica(capacity=2, activations=2, room_wait_s=0.2)) as replica:
        sampling = await replica.sampler.open(ask("acme/adder@1", max_tokens=400))
        stage.controls.load_gate.clear()
        asking = [asyncio.create_task(tokens(replica, ask(f"acme/adder@{number}"))) for number in (2, 3)]
        await until(lambda: any(task.done() for task in asking))
        stage.controls.load_gate.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert sorted(isinstance(answer, QueueFull) for answer in answers) == [False, True]
        await sampling.close()


async def test_what_the_engine_does_not_let_go_of_stays_resident_and_serves(stage: Stage) -> None:
    await stage.add("acme/adder@1")
    await stage.add("acme/adder@2")
    async with running(stage.replica(capacity=1, room_wait_s=0.3)) as replica:
        first = await tokens(replica, ask("acme/adder@1"))
        engine = stage.controls.engines[-1]
        unload = engine.unload

        async def refused(revision: str) -> None:
            raise RuntimeError(f"Call to remove_lora({revision}) failed")

        engine.unload = refused  # type: ignore[method-assign]
        with pytest.raises(QueueFull, match="pinned or in use"):
            await tokens(replica, ask("acme/adder@2"))
        assert [entry.revision for entry in replica.residency.residents()] == ["acme/adder@1"]
        assert await tokens(replica, ask("acme/adder@1")) == first
        engine.unload = unload  # type: ignore[method-assign]
        assert await tokens(replica, ask("acme/adder@2"))
    assert stage.controls.loads["acme/adder@1"] == 1


async def test_a_failed_swap_leaves_the_old_revision_serving_and_never_unloads_it(stage: Stage) -> None:
    """dynamo#8630."""
    await stage.add("acme/adder@1")
    await stage.add("acme/adder@2")
    await stage.desire("acme/adder@1", pinned=("acme/adder@1",))

    def broken(report: LoadReport) -> LoadReport:
        return replace(report, tensors_equal=False) if report.revision == "acme/adder@2" else report

    stage.controls.distort = broken
    async with running(stage.replica(capacity=2)) as replica:
        before = await tokens(replica, ask("acme/adder@1"))
        await stage.desire("acme/adder@2", "acme/adder@1", pinned=("acme/adder@1",))
        await until(lambda: replica.residency.failures.refused("acme/adder@2"))
        assert await tokens(replica, ask("acme/adder@1")) == before
        listed = [adapter.revision for adapter in await stage.controls.engines[-1].resident()]
        assert listed == [entry.revision for entry in replica.residency.residents()] == ["acme/adder@1"]
    assert stage.controls.loads["acme/adder@1"] == 1
    assert "acme/adder@1" not in stage.controls.unloads
