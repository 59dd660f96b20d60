"""One replica's sampler over limits, holds and turns: what waits where, and that all is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.serving.errors import EngineDown, InvalidRequest, QueueFull, RateLimited
from services.serving.limits import Bound, LimitSettings, RequestLimits
from services.serving.replica import ServingReplica
from services.serving.sampling import Sampler, Sampling
from services.serving.turns import TENURE, TurnBounds, Turns
from shared.engine.port import Capabilities, SampleChunk, SampleRequest
from shared.sampling.port import BACKGROUND
from shared.telemetry.metrics import REGISTRY
from tests.serving_kit import BASE_NAME, Engine, Stage, ask, make_base, running, until

A, B = "acme/a@1", "acme/b@1"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, make_base(tmp_path / "base"))


class Bounded(Sampler):
    """The replica's sampler with bounds of the test's own."""

    def __init__(
        self, replica: ServingReplica, bounds: TurnBounds | None = None, requests: LimitSettings | None = None
    ) -> None:
        self.turns = Turns(bounds or TurnBounds())
        limits = RequestLimits(requests or LimitSettings())
        super().__init__(replica.supervisor, replica.residency, "mini-0", self.turns, limits)

    def free(self) -> bool:
        """Whether nothing is held any more."""
        counts = (self.in_flight, self.waiting, self.turns.running, self.turns.waiting)
        return counts == (0, 0, 0, 0) and not self.turns._holders and self.idle.is_set()


async def served(sampler: Sampler, request: SampleRequest) -> Sampling:
    """Sampled to its end and closed."""
    sampling = await sampler.open(request)
    try:
        async for _ in sampling.chunks:
            pass
    finally:
        await sampling.close()
    return sampling


async def test_a_request_that_waits_for_its_load_has_no_turn(stage: Stage) -> None:
    await stage.add(A)
    async with running(stage.replica()) as replica:
        sampler = Bounded(replica, TurnBounds(running=1))
        stage.controls.load_gate.clear()
        cold = asyncio.create_task(served(sampler, ask(A)))
        await until(lambda: stage.controls.loads)
        await served(sampler, ask())
        assert (sampler.in_flight, sampler.waiting, sampler.turns.waiting) == (1, 1, 0)
        stage.controls.load_gate.set()
        await cold
        assert sampler.free()


async def test_a_request_that_waits_for_its_turn_keeps_its_revision_loaded(stage: Stage) -> None:
    await stage.add(A)
    async with running(stage.replica()) as replica:
        sampler = Bounded(replica, TurnBounds(running=1))
        first = await sampler.open(ask(max_tokens=400))
        waiting = asyncio.create_task(served(sampler, ask(A)))
        await until(lambda: sampler.turns.waiting)
        assert [entry.holds for entry in replica.residency.residents()] == [1]
        assert (sampler.in_flight, sampler.waiting) == (2, 1)
        await first.close()
        assert (await waiting).served.revision == A
        assert [entry.holds for entry in replica.residency.residents()] == [0]
        assert sampler.free()


async def test_the_turn_ends_with_the_last_token_not_with_the_reader(stage: Stage) -> None:
    async with running(stage.replica()) as replica:
        sampler = Bounded(replica, TurnBounds(running=2))
        slow = await sampler.open(ask(n=2, max_tokens=3))
        while sampler.turns.running:
            assert await anext(slow.chunks)
        await served(sampler, ask(n=2))
        assert sampler.in_flight == 1
        await slow.close()
        assert sampler.free()


async def test_a_cold_adapter_has_its_turn_among_a_hot_ones(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang#15129, vllm#16876: one slot, A, B, A x 20: B is served after at most 16 requests for A."""
    inner = Engine.capabilities
    monkeypatch.setattr(Engine, "capabilities", lambda self: one_slot(inner(self)))
    started: list[str | None] = []
    sample = Engine.sample

    def watched(self: Engine, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        started.append(request.revision)
        return sample(self, request)

    monkeypatch.setattr(Engine, "sample", watched)
    await stage.add(A)
    await stage.add(B)
    await stage.desire(A, B)
    async with running(stage.replica()) as replica:
        sampler = Bounded(replica)
        stage.controls.token_gate.clear()
        asking = []
        for revision in (A, B, *[A] * 20):
            asking.append(asyncio.create_task(served(sampler, ask(revision))))
            await asyncio.sleep(0)
        await until(lambda: sampler.turns.waiting == 21)
        stage.controls.token_gate.set()
        await asyncio.gather(*asking)
        assert sampler.free()
    assert started.index(B) <= TENURE == 16
    assert len(started) == 22


def one_slot(has: Capabilities) -> Capabilities:
    return replace(has, slots=1)


async def test_what_the_engine_dropped_is_loaded_again_without_keeping_the_turn(stage: Stage) -> None:
    await stage.add(A)
    async with running(stage.replica()) as replica:
        sampler = Bounded(replica, TurnBounds(running=1))
        await served(sampler, ask(A))
        await stage.controls.engines[-1]._inner.unload(A)
        stage.controls.load_gate.clear()
        again = asyncio.create_task(served(sampler, ask(A)))
        await until(lambda: stage.controls.loads[A] == 2)
        await served(sampler, ask())
        stage.controls.load_gate.set()
        assert (await again).served.revision == A
        assert sampler.free()


async def test_when_the_engine_dies_those_who_wait_are_answered_too(stage: Stage) -> None:
    await stage.add(A)
    async with running(stage.replica()) as replica:
        sampler = Bounded(replica, TurnBounds(running=1))
        stage.controls.token_gate.clear()
        first = await sampler.open(ask(A, max_tokens=400))
        waiting = [asyncio.create_task(served(sampler, ask(A))) for _ in range(5)]
        await until(lambda: sampler.turns.waiting == 5)
        stage.controls.engines[-1].die()
        stage.controls.token_gate.set()
        with pytest.raises(EngineDown):
            async for _ in first.chunks:
                pass
        await first.close()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(answer) for answer in answers] == [EngineDown] * 5
        assert sampler.free()


async def test_those_who_leave_while_they_wait_or_run_leave_nothing_behind(stage: Stage) -> None:
    await stage.add(A)
    async with running(stage.replica()) as replica:
        sampler = Bounded(replica, TurnBounds(running=2))
        stage.controls.token_gate.clear()
        asking = [asyncio.create_task(served(sampler, ask(A, max_tokens=400))) for _ in range(6)]
        await until(lambda: sampler.turns.waiting == 4)
        for task in reversed(asking):
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(sampler.free)
        assert [entry.holds for entry in replica.residency.residents()] == [0]


async def test_a_request_bounds_its_own_wait_for_a_turn_and_for_the_first_token(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(stage.replica()) as replica:
        sampler = Bounded(replica, TurnBounds(running=1))
        first = await sampler.open(ask(max_tokens=400))
        with pytest.raises(QueueFull, match="no turn came within") as late:
            await sampler.open(ask(wait_s=0.01))
        assert (late.value.status, late.value.queue_position) == (503, 1)
        await first.close()

        async def silent(self: Engine, request: SampleRequest) -> AsyncIterator[SampleChunk]:
            await asyncio.Event().wait()
            yield SampleChunk(0, ())

        monkeypatch.setattr(Engine, "sample", silent)
        with pytest.raises(QueueFull, match=r"no first token within 0\.01 s"):
            await sampler.open(ask(wait_s=0.01))
        assert sampler.free()


async def test_the_replicas_own_bound_holds_where_a_request_has_none(stage: Stage) -> None:
    async with running(stage.replica()) as replica:
        sampler = Bounded(replica, TurnBounds(running=1, wait_s=0.01))
        first = await sampler.open(ask(max_tokens=400))
        with pytest.raises(QueueFull, match="no turn came within"):
            await sampler.open(ask())
        await first.close()
        assert sampler.free()


async def test_limits_refuse_before_anything_is_loaded_or_waited_for(stage: Stage) -> None:
    await stage.add(A)
    async with running(stage.replica()) as replica:
        sampler = Bounded(replica, requests=LimitSettings(tenant=Bound(concurrency=1)))
        first = await sampler.open(ask(tenant="acme", max_tokens=400))
        before = refused("concurrency")
        with pytest.raises(RateLimited, match="acme has 1 requests here"):
            await sampler.open(ask(A, tenant="acme"))
        assert refused("concurrency") == before + 1
        assert not stage.controls.loads
        await served(sampler, ask(A))
        await first.close()
        await served(sampler, ask(A, tenant="acme"))
        assert sampler.free()


async def test_a_full_queue_is_counted_and_a_bad_request_keeps_no_place(stage: Stage) -> None:
    async with running(stage.replica()) as replica:
        sampler = Bounded(replica, TurnBounds(running=1, waiting=1), LimitSettings(tenant=Bound(concurrency=9)))
        first = await sampler.open(ask(max_tokens=400))
        waiting = asyncio.create_task(served(sampler, ask(tenant="acme", max_tokens=9999)))
        await until(lambda: sampler.turns.waiting == 1)
        before = refused("queue")
        with pytest.raises(QueueFull):
            await sampler.open(ask())
        assert refused("queue") == before + 1
        await first.close()
        with pytest.raises(InvalidRequest, match="max_context"):
            await waiting
        assert sampler.free()
        assert not any(meter._running for meter in sampler._limits._meters.values())


async def test_the_engine_runs_requests_in_the_order_of_their_turns(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks: dict[str, int] = {}
    sample = Engine.sample

    def watched(self: Engine, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        ranks[request.request_id] = request.priority
        return sample(self, request)

    monkeypatch.setattr(Engine, "sample", watched)
    async with running(stage.replica()) as replica:
        sampler = Bounded(replica)
        await served(sampler, ask(request_id="background", priority=BACKGROUND))
        for place in range(20):
            await served(sampler, ask(request_id=f"i{place}"))
    order = sorted(ranks, key=lambda name: ranks[name])
    assert order.index("background") in (15, 16)
    assert [name for name in order if name != "background"] == [f"i{place}" for place in range(20)]


def refused(reason: str) -> float:
    return REGISTRY.get_sample_value("mint_samples_refused_total", {"base": BASE_NAME, "reason": reason}) or 0.0
