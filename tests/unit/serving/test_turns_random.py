"""Turns under random traffic: the bounds hold at every step, nobody waits longer than was promised, nothing leaks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from services.serving.order import OVERTAKES
from services.serving.turns import TENURE, Turn, TurnBounds, Turns
from shared.engine.port import SampleRequest, SamplingSettings
from shared.sampling.port import BACKGROUND, INTERACTIVE, PREWARM

RUNNING, SLOTS = 5, 2


def request(tenant: str, revision: str | None, priority: int, n: int) -> SampleRequest:
    return SampleRequest("r", (1, 2), SamplingSettings(max_tokens=3), revision, n, None, priority, tenant)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@dataclass
class Crowd:
    """Requests in the order of their arrival, and the turns that they have."""

    turns: Turns
    slots: int
    waiting: list[asyncio.Task[Turn]] = field(default_factory=list)
    running: list[Turn] = field(default_factory=list)
    entered: int = 0

    async def come(self, asked: SampleRequest) -> None:
        self.waiting.append(asyncio.create_task(self.turns.take(asked, self.slots)))
        await self.look()

    async def end(self, place: int) -> None:
        self.turns.release(self.running.pop(place % len(self.running)))
        await self.look()

    async def leave(self, place: int) -> None:
        self.waiting[place % len(self.waiting)].cancel()
        await self.look()

    async def look(self) -> None:
        await settle()
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            if not task.cancelled():
                self.running.append(task.result())
                self.entered += 1


_comes = st.tuples(
    st.sampled_from(["", "t1", "t2", "t3"]),
    st.sampled_from([None, "p/a@1", "p/a@2", "p/b@1", "q/c@1"]),
    st.sampled_from([INTERACTIVE, PREWARM, BACKGROUND]),
    st.integers(1, RUNNING + 1),
)
_steps = st.lists(st.one_of(_comes, st.tuples(st.sampled_from(["end", "leave"]), st.integers(0, 50))), max_size=60)


@settings(max_examples=150, deadline=None)
@given(_steps)
def test_the_bounds_hold_everybody_gets_a_turn_and_nothing_leaks(steps: list[tuple[object, ...]]) -> None:
    async def run() -> None:
        crowd = Crowd(Turns(TurnBounds(RUNNING)), SLOTS)
        for step in steps:
            if len(step) == 4:
                await crowd.come(request(*step))  # type: ignore[arg-type]
            elif step[0] == "end" and crowd.running:
                await crowd.end(int(step[1]))  # type: ignore[call-overload]
            elif step[0] == "leave" and crowd.waiting:
                await crowd.leave(int(step[1]))  # type: ignore[call-overload]
            _check(crowd)
        while crowd.running:
            await crowd.end(0)
            _check(crowd)
        assert not crowd.waiting
        assert (crowd.turns.running, crowd.turns.requests, crowd.turns.waiting) == (0, 0, 0)
        assert not crowd.turns._holders
        assert not any(cls.tenants for cls in crowd.turns._waiting._classes.values())

    asyncio.run(run())


def _check(crowd: Crowd) -> None:
    assert crowd.turns.running == sum(turn.sequences for turn in crowd.running) <= RUNNING
    assert len({turn.revision for turn in crowd.running} - {None}) <= SLOTS
    assert (crowd.turns.requests, crowd.turns.waiting) == (len(crowd.running), len(crowd.waiting))
    # Nobody waits beside an engine that is empty.
    assert crowd.running or not crowd.waiting


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 3),
    hot=st.integers(1, 4),
    tenants=st.integers(1, 3),
    running=st.integers(1, 12),
    before=st.integers(0, 40),
    priority=st.sampled_from([INTERACTIVE, PREWARM, BACKGROUND]),
)
def test_a_cold_request_has_its_turn_within_the_bound_however_hot_the_others_are(
    slots: int, hot: int, tenants: int, running: int, before: int, priority: int
) -> None:
    """`hot` adapters of `tenants` tenants keep the engine and the queue full for ever: one comes for each that ends.
    Per place in the order, a closed revision has `TENURE` turns at most; the other holders go on while its running
    requests end, which is `running` turns where requests end in the order of their turns."""

    async def run() -> None:
        crowd = Crowd(Turns(TurnBounds(running)), slots)
        made = 0

        async def come() -> None:
            nonlocal made
            made += 1
            await crowd.come(request(f"t{made % tenants}", f"hot/p{made % hot}@1", INTERACTIVE, 1))

        for _ in range(2 * running + 8):
            await come()
        for _ in range(before):
            await crowd.end(0)
            await come()
        crowd.waiting.append(asyncio.create_task(crowd.turns.take(request("cold", "cold/p@1", priority, 1), slots)))
        cold = crowd.waiting[-1]
        await crowd.look()
        then = crowd.entered
        # Each other tenant may get a freed slot once before it; a patient request waits for its class as well.
        patience = 0 if priority == INTERACTIVE else 2 * (OVERTAKES + 1)
        bound = (tenants + 1) * (TENURE + running) + patience
        while not cold.done():
            await crowd.end(0)
            await come()
            assert crowd.entered - then <= bound
        for task in crowd.waiting:
            task.cancel()
        await settle()

    asyncio.run(run())
