"""Cold loads as scheduled work: two stages, urgency, turns, bounds, deadlines and estimates."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.serving.backlog import GRACE_S, KEPT_PLACES, Asker
from services.serving.errors import EngineDown, LoadFailed, Loading, QueueFull
from services.serving.loader import Fetched
from services.serving.loads import LoadBounds, LoadScheduler
from services.serving.pace import Pace
from shared.adapters.manifest import Manifest
from shared.sampling.port import BACKGROUND, INTERACTIVE, PREWARM

LONG_S = 60.0


class World:
    """Both stages, held back by gates, on a clock of their own: an activation takes `seconds`."""

    def __init__(self) -> None:
        self.now, self.seconds, self.busy = 0.0, 1.0, False
        self.fetch_seconds = 0.0
        self.fetches: list[str] = []
        self.activations: list[tuple[str, float]] = []
        self.fetching, self.most_fetching = 0, 0
        self.fetch_gate, self.activate_gate = asyncio.Event(), asyncio.Event()
        self.fetch_gate.set()
        self.activate_gate.set()
        self.broken: set[str] = set()
        self.resident: set[str] = set()
        self.on_disk: set[str] = set()

    def near(self, revision: str) -> bool:
        return revision in self.on_disk

    async def fetch(self, revision: str) -> Fetched | None:
        self.fetches.append(revision)
        self.fetching += 1
        self.most_fetching = max(self.most_fetching, self.fetching)
        if revision not in self.on_disk:
            await self.fetch_gate.wait()
            self.now += self.fetch_seconds
        await asyncio.sleep(0)
        self.fetching -= 1
        if revision in self.broken:
            raise LoadFailed(f"{revision} is broken")
        if revision in self.resident:
            return None
        named: Any = {"revision": revision, "adapter_sha256": f"sha-{revision}"}
        manifest = Manifest.model_construct(None, **named)
        return Fetched(manifest, Path(revision), "catalog")

    async def activate(self, fetched: Fetched, began: Callable[[], None]) -> None:
        self.activations.append((fetched.manifest.revision, self.now))
        began()
        await self.activate_gate.wait()
        self.now += self.seconds
        await _settle()

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    def clock(self) -> float:
        return self.now

    def activated(self) -> list[str]:
        return [revision for revision, _ in self.activations]

    @asynccontextmanager
    async def scheduler(self, share: float = 1.0, start: bool = True, **bounds: int) -> AsyncIterator[LoadScheduler]:
        pace = Pace(share, lambda: self.busy, self.clock, self.sleep)
        scheduler = LoadScheduler(self, LoadBounds(**bounds), pace, self.clock)
        if start:
            scheduler.start()
        try:
            yield scheduler
        finally:
            await scheduler.stop()


@pytest.fixture
async def world() -> World:
    return World()


async def _settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def _ask(
    scheduler: LoadScheduler,
    revision: str,
    priority: int = INTERACTIVE,
    tenant: str | None = None,
    timeout_s: float = LONG_S,
) -> asyncio.Task[None]:
    """A waiter that is in the queue when this returns."""
    asker = Asker(priority, tenant if tenant is not None else revision.partition("/")[0])
    task = asyncio.create_task(scheduler.wait(revision, timeout_s, asker))
    await _settle()
    return task


async def test_50_waiters_are_one_fetch_and_one_activation(world: World) -> None:
    world.fetch_gate.clear()
    async with world.scheduler() as scheduler:
        waiting = [await _ask(scheduler, "acme/a@1") for _ in range(50)]
        assert [view.waiters for view in scheduler.views()] == [50]
        world.fetch_gate.set()
        await asyncio.gather(*waiting)
    assert (world.fetches, world.activated()) == (["acme/a@1"], ["acme/a@1"])


async def test_fetches_run_side_by_side_while_one_activation_runs_and_not_far_ahead_of_it(world: World) -> None:
    """4 fetches at once; of 12 loads the one in the engine and the next 5 are on disk, the others are not."""
    world.fetch_gate.clear()
    world.activate_gate.clear()
    async with world.scheduler(fetches=4, activations=1) as scheduler:
        waiting = [await _ask(scheduler, f"acme/a@{number}") for number in range(12)]
        assert world.fetching == 4
        world.fetch_gate.set()
        await _settle()
        assert world.activated() == ["acme/a@0"]
        assert len(world.fetches) == 1 + 5
        assert scheduler.stages() == {"queued": 6, "fetching": 0, "fetched": 5, "activating": 1}
        assert scheduler.digests() == {f"sha-acme/a@{number}" for number in range(6)}
        world.activate_gate.set()
        await asyncio.gather(*waiting)
    assert world.most_fetching == 4
    assert Counter(world.activated()) == {f"acme/a@{number}": 1 for number in range(12)}


async def test_as_many_activations_run_at_once_as_are_allowed(world: World) -> None:
    world.activate_gate.clear()
    async with world.scheduler(activations=2) as scheduler:
        waiting = [await _ask(scheduler, f"acme/a@{number}") for number in range(4)]
        assert scheduler.stages()["activating"] == 2
        world.activate_gate.set()
        await asyncio.gather(*waiting)


async def test_an_urgent_load_goes_before_less_urgent_ones_that_are_on_disk_already(world: World) -> None:
    world.activate_gate.clear()
    async with world.scheduler(fetches=2) as scheduler:
        waiting = [await _ask(scheduler, f"acme/b@{number}", BACKGROUND) for number in range(6)]
        waiting.append(await _ask(scheduler, "acme/p@1", PREWARM))
        waiting.append(await _ask(scheduler, "acme/i@1", INTERACTIVE))
        assert scheduler.waiting()[:4] == ["acme/b@0", "acme/i@1", "acme/p@1", "acme/b@1"]
        world.activate_gate.set()
        await asyncio.gather(*waiting)
    assert world.activated()[:3] == ["acme/b@0", "acme/i@1", "acme/p@1"]


async def test_a_later_more_urgent_waiter_raises_the_shared_load(world: World) -> None:
    world.activate_gate.clear()
    async with world.scheduler() as scheduler:
        waiting = [await _ask(scheduler, f"acme/b@{number}", BACKGROUND) for number in range(4)]
        waiting.append(await _ask(scheduler, "acme/b@3", INTERACTIVE))
        assert scheduler.waiting() == ["acme/b@0", "acme/b@3", "acme/b@1", "acme/b@2"]
        world.activate_gate.set()
        await asyncio.gather(*waiting)
    assert world.activated() == ["acme/b@0", "acme/b@3", "acme/b@1", "acme/b@2"]
    assert world.fetches.count("acme/b@3") == 1


async def test_background_work_is_not_starved_by_a_stream_of_urgent_loads(world: World) -> None:
    world.activate_gate.clear()
    async with world.scheduler() as scheduler:
        waiting = [await _ask(scheduler, "acme/first@1")]
        waiting.append(await _ask(scheduler, "acme/b@1", BACKGROUND))
        waiting += [await _ask(scheduler, f"acme/i@{number}") for number in range(20)]
        world.activate_gate.set()
        await asyncio.gather(*waiting)
    assert world.activated().index("acme/b@1") == 1 + 8


async def test_tenants_take_turns_whoever_asks_most(world: World) -> None:
    world.activate_gate.clear()
    async with world.scheduler() as scheduler:
        waiting = [await _ask(scheduler, f"big/a@{number}") for number in range(6)]
        waiting.append(await _ask(scheduler, "small/a@1"))
        waiting.append(await _ask(scheduler, "big/a@9", tenant="other"))
        world.activate_gate.set()
        await asyncio.gather(*waiting)
    assert world.activated()[:4] == ["big/a@0", "small/a@1", "big/a@9", "big/a@1"]


async def test_a_deadline_is_answered_with_the_place_and_the_expected_wait(world: World) -> None:
    async with world.scheduler() as scheduler:
        for number, seconds in enumerate((2.0, 3.0, 40.0)):
            world.seconds = seconds
            await (await _ask(scheduler, f"acme/done@{number}"))
        world.activate_gate.clear()
        others = [await _ask(scheduler, f"acme/a@{number}") for number in range(3)]
        late = await _ask(scheduler, "acme/late@1", timeout_s=0.0)
        with pytest.raises(Loading) as told:
            await late
        assert (told.value.queue_position, told.value.expected_wait_s) == (4, 4 * 3.0)
        assert told.value.retry_after_s == 12.0
        world.seconds = 3.0
        world.activate_gate.set()
        await asyncio.gather(*others)
        await _settle()
    assert "acme/late@1" in world.activated()


async def test_the_expected_wait_counts_the_pauses_and_the_activations_at_once(world: World) -> None:
    world.activate_gate.clear()
    async with world.scheduler(share=0.25, activations=2, depth=3) as scheduler:
        waiting = [await _ask(scheduler, f"acme/a@{number}") for number in range(3)]
        world.busy = True
        with pytest.raises(QueueFull) as refused:
            await (await _ask(scheduler, "acme/a@9"))
        assert (refused.value.queue_position, refused.value.expected_wait_s) == (4, 4 * 1.0 * 4 / 2)
        world.busy = False
        world.activate_gate.set()
        await asyncio.gather(*waiting)


async def test_a_full_queue_refuses_and_puts_out_only_what_is_less_urgent(world: World) -> None:
    world.activate_gate.clear()
    async with world.scheduler(depth=4) as scheduler:
        begun = await _ask(scheduler, "acme/b@0", BACKGROUND)
        old, young = await _ask(scheduler, "acme/b@1", BACKGROUND), await _ask(scheduler, "acme/b@2", BACKGROUND)
        prewarm = await _ask(scheduler, "acme/p@1", PREWARM)
        with pytest.raises(QueueFull) as refused:
            await (await _ask(scheduler, "acme/b@3", BACKGROUND))
        assert (refused.value.status, refused.value.queue_position) == (503, 5)
        urgent = [await _ask(scheduler, "acme/i@1")]
        with pytest.raises(QueueFull, match="acme/b@2 gave way"):
            await young
        urgent.append(await _ask(scheduler, "acme/i@2"))
        with pytest.raises(QueueFull, match="acme/b@1 gave way"):
            await old
        urgent.append(await _ask(scheduler, "acme/i@3"))
        with pytest.raises(QueueFull, match=r"acme/p@1 gave way to a more urgent one"):
            await prewarm
        with pytest.raises(QueueFull, match="4 loads are queued"):
            await (await _ask(scheduler, "acme/i@4"))
        world.activate_gate.set()
        await asyncio.gather(begun, *urgent)
    assert world.activated() == ["acme/b@0", "acme/i@1", "acme/i@2", "acme/i@3"]


async def test_while_requests_run_activations_take_their_share_of_the_time(world: World) -> None:
    world.activate_gate.clear()
    world.seconds, world.busy = 2.0, True
    async with world.scheduler(share=0.25) as scheduler:
        waiting = [await _ask(scheduler, f"acme/a@{number}") for number in range(3)]
        world.activate_gate.set()
        await asyncio.gather(*waiting)
    assert [at for _, at in world.activations] == pytest.approx([0.0, 8.0, 16.0])


async def test_without_requests_activations_follow_each_other(world: World) -> None:
    world.activate_gate.clear()
    world.seconds = 2.0
    async with world.scheduler(share=0.25) as scheduler:
        waiting = [await _ask(scheduler, f"acme/a@{number}") for number in range(3)]
        world.activate_gate.set()
        await asyncio.gather(*waiting)
    assert [at for _, at in world.activations] == [0.0, 2.0, 4.0]


async def test_what_is_urgent_and_comes_during_a_pause_goes_first(world: World) -> None:
    world.seconds, world.busy = 1.0, True
    paused = asyncio.Event()
    goes_on = asyncio.Event()

    async def sleep(seconds: float) -> None:
        paused.set()
        await goes_on.wait()
        world.now += seconds

    world.sleep = sleep  # type: ignore[method-assign]
    async with world.scheduler(share=0.5) as scheduler:
        waiting = [await _ask(scheduler, f"acme/b@{number}", BACKGROUND) for number in range(2)]
        await paused.wait()
        waiting.append(await _ask(scheduler, "acme/i@1"))
        goes_on.set()
        await asyncio.gather(*waiting)
    assert world.activated() == ["acme/b@0", "acme/i@1", "acme/b@1"]


async def test_a_load_that_everybody_left_is_dropped_before_it_is_begun(world: World) -> None:
    world.activate_gate.clear()
    async with world.scheduler(fetches=1) as scheduler:
        first = await _ask(scheduler, "acme/a@1")
        leaving = [await _ask(scheduler, f"acme/left@{number}") for number in (1, 1, 2, 3, 4)]
        for task in leaving:
            task.cancel()
        await _settle()
        assert scheduler.waiting() == ["acme/a@1"]
        world.activate_gate.set()
        await first
        await _settle()
    assert world.activated() == ["acme/a@1"]
    assert "acme/left@4" not in world.fetches


async def test_a_caller_that_leaves_stops_no_load_that_others_share(world: World) -> None:
    world.activate_gate.clear()
    async with world.scheduler() as scheduler:
        first = await _ask(scheduler, "acme/a@1")
        leaving, staying = await _ask(scheduler, "acme/b@1"), await _ask(scheduler, "acme/b@1", BACKGROUND)
        leaving.cancel()
        await _settle()
        assert [(view.urgency, view.waiters) for view in scheduler.views()] == [(INTERACTIVE, 1), (BACKGROUND, 1)]
        world.activate_gate.set()
        await asyncio.gather(first, staying)
    assert world.activated() == ["acme/a@1", "acme/b@1"]


async def test_who_is_told_when_to_come_back_finds_the_place_kept_until_then(world: World) -> None:
    world.activate_gate.clear()
    async with world.scheduler() as scheduler:
        first = await _ask(scheduler, "acme/a@1")
        with pytest.raises(Loading) as told:
            await (await _ask(scheduler, "acme/b@1", timeout_s=0.0))
        behind = await _ask(scheduler, "acme/c@1")
        assert scheduler.waiting() == ["acme/a@1", "acme/b@1", "acme/c@1"]
        world.now += (told.value.retry_after_s or 0.0) + GRACE_S
        world.activate_gate.set()
        await asyncio.gather(first, behind)
    assert world.activated() == ["acme/a@1", "acme/c@1"]


async def test_a_load_that_fails_is_told_to_all_who_wait_and_the_next_goes_on(world: World) -> None:
    world.broken = {"acme/bad@1"}
    world.fetch_gate.clear()
    async with world.scheduler() as scheduler:
        bad = [await _ask(scheduler, "acme/bad@1") for _ in range(3)]
        good = await _ask(scheduler, "acme/a@1")
        world.fetch_gate.set()
        for task in bad:
            with pytest.raises(LoadFailed, match="is broken"):
                await task
        await good
    assert world.activated() == ["acme/a@1"]


async def test_a_tenant_whose_loads_all_fail_takes_turns_like_the_others(world: World) -> None:
    world.broken = {f"bad/a@{number}" for number in range(10)}
    world.fetch_gate.clear()
    async with world.scheduler(fetches=1) as scheduler:
        served = [await _ask(scheduler, "good/a@0")]
        failing = [await _ask(scheduler, revision) for revision in sorted(world.broken)]
        served += [await _ask(scheduler, f"good/a@{number}") for number in (1, 2)]
        world.fetch_gate.set()
        await asyncio.gather(*served)
        await asyncio.gather(*failing, return_exceptions=True)
    assert set(world.fetches[:4]) == {"good/a@0", "bad/a@0", "good/a@1", "bad/a@1"}


async def test_what_turns_out_to_be_resident_is_not_activated(world: World) -> None:
    world.resident = {"acme/a@1"}
    async with world.scheduler() as scheduler:
        await (await _ask(scheduler, "acme/a@1"))
    assert world.activations == []


async def test_stopping_answers_everybody_and_takes_nobody_more(world: World) -> None:
    world.activate_gate.clear()
    async with world.scheduler() as scheduler:
        waiting = [await _ask(scheduler, f"acme/a@{number}") for number in range(8)]
        await scheduler.stop()
        for task in waiting:
            with pytest.raises(EngineDown, match="shutting down"):
                await task
        with pytest.raises(EngineDown, match="shutting down"):
            await scheduler.wait("acme/a@1", LONG_S, Asker())
        assert scheduler.waiting() == []


async def test_a_full_queue_takes_a_place_from_the_tenant_with_most_loads(world: World) -> None:
    world.activate_gate.clear()
    async with world.scheduler(depth=4) as scheduler:
        big = [await _ask(scheduler, f"big/a@{number}") for number in range(4)]
        small = [await _ask(scheduler, f"small/a@{number}") for number in (1, 2)]
        for task in (big.pop(), big.pop()):
            with pytest.raises(QueueFull, match="gave way to one of a tenant with fewer"):
                await task
        for revision in ("small/a@3", "big/a@9"):
            with pytest.raises(QueueFull, match="4 loads are queued") as refused:
                await (await _ask(scheduler, revision))
            assert refused.value.queue_position == 5
        with pytest.raises(QueueFull):
            await (await _ask(scheduler, "other/a@1", BACKGROUND))
        world.activate_gate.set()
        await asyncio.gather(*big, *small)


async def test_a_load_that_another_tenant_waits_for_does_not_give_way(world: World) -> None:
    world.activate_gate.clear()
    async with world.scheduler(depth=4) as scheduler:
        waiting = [await _ask(scheduler, f"big/a@{number}") for number in range(3)]
        young = await _ask(scheduler, "big/a@3")
        waiting.append(await _ask(scheduler, "big/a@3", tenant="other"))
        waiting.append(await _ask(scheduler, "small/a@1"))
        with pytest.raises(QueueFull, match="big/a@2 gave way"):
            await waiting.pop(2)
        world.activate_gate.set()
        await asyncio.gather(young, *waiting)


async def test_few_places_are_kept_for_a_tenant_whose_callers_are_all_gone(world: World) -> None:
    """64 requests that wait 1 ms for 64 policies leave 4 loads behind, not 64."""
    async with world.scheduler(start=False) as scheduler:
        for number in range(64):
            with pytest.raises(Loading):
                await (await _ask(scheduler, f"big/a@{number}", timeout_s=0.0))
        with pytest.raises(Loading):
            await (await _ask(scheduler, "small/a@1", timeout_s=0.0))
        assert KEPT_PLACES == 4
        assert sorted(scheduler.waiting()) == [*(f"big/a@{number}" for number in range(4)), "small/a@1"]


async def test_files_that_are_here_pass_downloads_that_hang(world: World) -> None:
    world.fetch_gate.clear()
    world.on_disk = {"acme/here@1"}
    async with world.scheduler(fetches=4) as scheduler:
        hanging = [await _ask(scheduler, f"acme/a@{number}") for number in range(8)]
        await (await _ask(scheduler, "acme/here@1"))
        assert (world.activated(), scheduler.stages()["fetching"]) == (["acme/here@1"], 4)
        world.fetch_gate.set()
        await asyncio.gather(*hanging)


@pytest.mark.parametrize(("fetch_seconds", "each_s"), [(5.0, 2.5), (1.0, 1.0)])
async def test_the_expected_wait_is_the_slower_stages(world: World, fetch_seconds: float, each_s: float) -> None:
    async with world.scheduler(fetches=2) as scheduler:
        world.fetch_seconds = fetch_seconds
        await (await _ask(scheduler, "acme/done@1"))
        world.activate_gate.clear()
        waiting = await _ask(scheduler, "acme/a@1")
        assert [view.expected_wait_s for view in scheduler.views()] == [each_s]
        world.activate_gate.set()
        await waiting
