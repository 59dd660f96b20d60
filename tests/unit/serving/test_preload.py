"""Loads that no request asks for: only while there is room, beside older ones, and through a catalog's absence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from mint_schemas.common import FileRef

from services.serving import residency
from services.serving.errors import Unavailable
from services.serving.eviction import Lru
from services.serving.memory import MemoryTier
from services.serving.preload import Preloads
from services.serving.replica import ServingReplica
from services.serving.wanted import Wanted
from shared.adapters import layout
from shared.adapters.manifest import Manifest
from tests.serving_kit import Stage, ask, make_base, running, tokens, until


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, make_base(tmp_path / "base"))


class Held:
    """The downloads of one adapter, held back until `gate`."""

    def __init__(self, stage: Stage, manifest: Manifest) -> None:
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        key, fetch = manifest.files[layout.TENSOR_FILE].key, stage.store.fetch

        async def held(ref: FileRef, path: Path) -> None:
            if ref.key == key:
                self.begun.set()
                await self.gate.wait()
            await fetch(ref, path)

        stage.store.fetch = held  # type: ignore[method-assign]


def _asking(replica: ServingReplica, revision: str) -> asyncio.Task[tuple[int, ...]]:
    return asyncio.create_task(tokens(replica, ask(revision)))


def _resident(working_set: residency.Residency) -> list[str]:
    return sorted(entry.revision for entry in working_set.residents())


async def test_what_need_not_be_kept_and_does_not_fit_by_bytes_is_not_loaded_again_and_again(stage: Stage) -> None:
    """16 places, 16 revisions, bytes for 11: 11 are loaded once, nothing leaves, and the replica is healthy."""
    names = [f"acme/p{number}@1" for number in range(16)]
    size = max([(await stage.add(name)).adapter_bytes for name in names])
    await stage.desire(*names, lately=tuple(names))
    async with running(stage.replica(capacity=16, memory_bytes=11 * size)) as replica:
        assert len(replica.residency.residents()) == 11
        assert replica.residency.missing() == []
        assert set(stage.controls.loads.values()) == {1}
        assert (len(stage.controls.loads), stage.controls.unloads) == (11, {})


async def test_room_that_requests_took_during_a_preload_is_left_to_them(stage: Stage) -> None:
    lately, *hot = "acme/lately@1", "acme/hot1@1", "acme/hot2@1"
    held = Held(stage, await stage.add(lately))
    for name in hot:
        await stage.add(name)
    await stage.desire(lately, lately=(lately,))
    async with running(stage.replica(capacity=3), healthy=False) as replica:
        await held.begun.wait()
        for name in hot:
            assert await tokens(replica, ask(name))
        held.gate.set()
        await until(lambda: replica.healthy() is None)
        assert _resident(replica.residency) == hot
        assert (stage.controls.loads, stage.controls.unloads) == (dict.fromkeys(hot, 1), {})


async def test_a_request_for_what_is_preloaded_meanwhile_gets_it_whatever_leaves(stage: Stage) -> None:
    lately, *hot = "acme/lately@1", "acme/hot1@1", "acme/hot2@1", "acme/hot3@1"
    held = Held(stage, await stage.add(lately))
    for name in hot:
        await stage.add(name)
    await stage.desire(lately, lately=(lately,))
    async with running(stage.replica(capacity=3), healthy=False) as replica:
        await held.begun.wait()
        for name in hot:
            assert await tokens(replica, ask(name))
        asked = _asking(replica, lately)
        await until(lambda: replica.sampler.waiting)
        held.gate.set()
        assert await asked


async def test_a_new_list_waits_for_no_load_of_an_old_one(stage: Stage) -> None:
    held = Held(stage, await stage.add("acme/hangs@1"))
    await stage.add("acme/next@1")
    await stage.desire("acme/hangs@1")
    async with running(stage.replica(), healthy=False) as replica:
        await held.begun.wait()
        await stage.desire("acme/next@1", "acme/hangs@1")
        await until(lambda: _resident(replica.residency) == ["acme/next@1"])
        assert "acme/hangs@1" in str(replica.healthy())
        held.gate.set()
        await until(lambda: replica.healthy() is None)
    assert stage.controls.loads == {"acme/next@1": 1, "acme/hangs@1": 1}


async def test_a_working_set_comes_back_without_the_catalog(stage: Stage) -> None:
    await stage.add("acme/a@1")
    async with running(stage.replica()) as replica:
        first = await tokens(replica, ask("acme/a@1"))
        stage.catalog.down = True
        stage.controls.engines[-1].die()
        await until(lambda: len(stage.controls.engines) == 2 and replica.healthy() is None)
        assert _resident(replica.residency) == ["acme/a@1"]
        assert await tokens(replica, ask("acme/a@1")) == first
    assert stage.catalog.asked == {"acme/a@1": 1}


async def test_what_the_catalog_was_away_for_is_restored_once_it_is_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "RESTORE_AGAIN_S", 0.02)
    await stage.add("acme/a@1")
    async with running(stage.replica()) as replica:
        await tokens(replica, ask("acme/a@1"))
        replica.residency._loader._manifests.clear()
        stage.catalog.down = True
        stage.controls.engines[-1].die()
        await until(lambda: stage.catalog.asked["acme/a@1"] >= 4)
        await until(lambda: replica.healthy() is None)
        assert _resident(replica.residency) == []
        stage.catalog.down = False
        await until(lambda: _resident(replica.residency) == ["acme/a@1"])


async def test_a_fetch_that_hangs_gives_its_worker_back(stage: Stage) -> None:
    held = Held(stage, await stage.add("acme/hangs@1"))
    await stage.add("acme/b@1")
    async with running(stage.replica(fetches=1, fetch_s=0.05)) as replica:
        hanging = _asking(replica, "acme/hangs@1")
        await held.begun.wait()
        assert await tokens(replica, ask("acme/b@1"))
        with pytest.raises(Unavailable, match=r"did not come within 0\.05 s"):
            await hanging
        assert list(replica.files.root.glob(".partial-*")) == []


async def test_who_waits_for_a_working_set_waits_for_what_another_list_brings_already() -> None:
    begun, gate = list[str](), asyncio.Event()

    async def load(revision: str) -> None:
        begun.append(revision)
        await gate.wait()

    memory = MemoryTier(4, 100, Lru(), room_wait_s=60.0)
    preloads = Preloads(memory, Wanted(4, 100), load, at_once=2)
    first = asyncio.create_task(preloads.run(["acme/a@1"], lambda: False, join=False))
    await asyncio.sleep(0.01)
    assert await preloads.run(["acme/a@1"], lambda: False, join=False) == []
    waiting = asyncio.create_task(preloads.run(["acme/a@1"], lambda: False, join=True))
    await asyncio.sleep(0.01)
    assert (begun, waiting.done()) == (["acme/a@1"] * 2, False)
    gate.set()
    assert [await first, await waiting] == [[], []]
