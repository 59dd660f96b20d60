"""Turns before the engine: who may enter, in which order, and what is given back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import pytest

from services.serving.errors import QueueFull
from services.serving.order import OVERTAKES
from services.serving.turns import TENURE, Turn, TurnBounds, Turns
from shared.engine.port import SampleRequest, SamplingSettings
from shared.sampling.port import BACKGROUND, INTERACTIVE, PREWARM

A, B, C = "acme/a@1", "acme/b@1", "acme/c@1"


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Door:
    """Requests by name: `come` asks for a turn, `end` gives it back; `entered` is the order of the turns."""

    running: int = 4
    slots: int = 4
    waiting: int = 1024
    clock: Clock = field(default_factory=Clock)
    entered: list[str] = field(default_factory=list)
    turns: Turns = field(init=False)
    tasks: dict[str, asyncio.Task[Turn]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = Turns(TurnBounds(self.running, self.waiting), self.clock)

    async def come(self, name: str, revision: str | None = A, wait_s: float | None = None, **about: Any) -> None:
        task = self.tasks[name] = asyncio.create_task(self._go(name, request(revision, **about), wait_s))
        await settle()
        if task.done() and not task.cancelled() and task.exception() is not None:
            task.result()

    async def end(self, *names: str) -> None:
        for name in names:
            self.turns.release(self.tasks[name].result())
            await settle()

    async def drain(self) -> list[str]:
        """End the requests in the order of their turns, one at a time; all names in the order of their turns."""
        place = 0
        while place < len(self.entered):
            await self.end(self.entered[place])
            place += 1
        return self.entered

    async def _go(self, name: str, asked: SampleRequest, wait_s: float | None) -> Turn:
        turn = await self.turns.take(asked, self.slots, wait_s)
        self.entered.append(name)
        return turn


def request(
    revision: str | None = A, *, tenant: str = "acme", priority: int = INTERACTIVE, n: int = 1, cost: int = 2
) -> SampleRequest:
    return SampleRequest("r", (1,), SamplingSettings(max_tokens=cost - 1), revision, n, None, priority, tenant)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def runs(names: list[str]) -> list[tuple[str, int]]:
    """How many in a row had the same first letter."""
    return [(letter, len(list(group))) for letter, group in groupby(name[0] for name in names)]


def nothing_is_left(turns: Turns) -> bool:
    counts = (turns.running, turns.requests, turns.waiting, len(turns._holders))
    return counts == (0, 0, 0, 0) and not any(cls.tenants or cls.asking for cls in turns._waiting._classes.values())


def test_while_there_is_room_entering_waits_for_nothing() -> None:
    """Not one step of the event loop lies between asking and having: there is no loop here at all."""
    turns = Turns(TurnBounds(running=3))
    for revision in (A, B, None):
        with pytest.raises(StopIteration) as entered:
            turns.take(request(revision), slots=2).send(None)
        assert entered.value.value.running
    assert (turns.running, turns.requests, turns.waiting) == (3, 3, 0)


async def test_running_sequences_are_bounded_and_n_counts() -> None:
    door = Door(running=4)
    await door.come("three", n=3)
    await door.come("one")
    await door.come("late")
    assert (door.entered, door.turns.running, door.turns.waiting) == (["three", "one"], 4, 1)
    await door.end("one")
    assert door.entered == ["three", "one", "late"]


async def test_a_request_of_more_sequences_than_the_bound_has_the_engine_to_itself() -> None:
    door = Door(running=4)
    await door.come("small")
    await door.come("huge", n=9)
    await door.come("after")
    assert door.entered == ["small"]
    await door.end("small")
    assert (door.entered, door.turns.running) == (["small", "huge"], 4)
    await door.end("huge")
    assert door.entered == ["small", "huge", "after"]


async def test_small_requests_do_not_keep_a_large_one_out() -> None:
    door = Door(running=4)
    for name in ("s1", "s2", "s3"):
        await door.come(name)
    await door.come("large", n=4)
    for place in range(10):
        await door.come(f"later{place}")
    await door.end("s1", "s2", "s3")
    assert door.entered == ["s1", "s2", "s3", "large"]


async def test_distinct_revisions_are_bounded_by_the_slots_and_the_base_needs_none() -> None:
    door = Door(running=9, slots=2)
    for name, revision in (("a", A), ("b", B), ("c", C), ("base", None)):
        await door.come(name, revision)
    assert door.entered == ["a", "b", "base"]
    await door.end("b")
    assert door.entered == ["a", "b", "base", "c"]


async def test_a_hot_adapter_does_not_starve_a_cold_one() -> None:
    """sglang#15129, vllm#16876: one slot, A, B, A x 20: B's turn comes after at most 16 of A's requests (`TENURE`);
    here, where no A waited before B, it is the next one."""
    door = Door(running=64, slots=1)
    await door.come("A0", A)
    await door.come("B", B)
    for place in range(1, 21):
        await door.come(f"A{place}", A)
    assert door.entered == ["A0"]
    await door.drain()
    assert TENURE == 16
    assert door.entered.index("B") == 1
    assert len(door.entered) == 22
    assert nothing_is_left(door.turns)


async def test_revisions_that_share_a_slot_take_it_by_tenures_of_16_so_that_batches_stay_full() -> None:
    door = Door(running=64, slots=1)
    await door.come("x", C)
    for place in range(40):
        await door.come(f"A{place}", A)
        await door.come(f"B{place}", B)
    await door.drain()
    assert runs(door.entered) == [("x", 1), ("A", 16), ("B", 16), ("A", 16), ("B", 16), ("A", 8), ("B", 8)]


async def test_only_the_longest_holder_is_closed() -> None:
    door = Door(running=64, slots=2)
    await door.come("a0", A)
    await door.come("b0", B)
    await door.come("c0", C)
    await door.come("a1", A)
    await door.come("b1", B)
    assert door.entered == ["a0", "b0", "b1"]
    await door.end("a0")
    assert door.entered == ["a0", "b0", "b1", "c0"]


async def test_a_holder_that_never_ends_does_not_keep_everybody_out() -> None:
    """4 slots; A, the oldest holder, has one endless stream; B, C and D are hot: after 16 turns and one for each of
    the 4 requests that ran, B is closed as well, and cold E has its slot when B's last ends, one turn later."""
    door = Door(running=64, slots=4)
    names = {"A": A, "B": B, "C": C, "D": "acme/d@1"}
    for name, revision in names.items():
        await door.come(f"{name}0", revision)
    await door.come("E", "acme/e@1")
    latest = dict.fromkeys("BCD", 0)
    for turn in range(60):
        name = "BCD"[turn % 3]
        latest[name] += 1
        await door.come(f"{name}{latest[name]}", names[name])
        if f"{name}{latest[name] - 1}" in door.entered:
            await door.end(f"{name}{latest[name] - 1}")
        if "E" in door.entered:
            break
    assert door.entered.index("E") == 4 + TENURE + 4 + 1
    assert "A0" in door.entered
    assert not door.tasks["A0"].result().over


@pytest.mark.parametrize("priority", [PREWARM, BACKGROUND])
async def test_work_that_nobody_watches_closes_a_slot_after_8_turns_of_others(priority: int) -> None:
    door = Door(running=64, slots=1)
    await door.come("a", A)
    await door.come("patient", B, priority=priority)
    for place in range(20):
        await door.come(f"a{place}", A)
    assert OVERTAKES == 8
    assert len(door.entered) == 1 + 8
    await door.drain()
    assert door.entered.index("patient") == 1 + 8


@pytest.mark.parametrize("priority", [PREWARM, BACKGROUND])
async def test_a_patient_request_is_overtaken_by_8_more_urgent_ones_at_most(priority: int) -> None:
    door = Door(running=1)
    await door.come("first")
    await door.come("patient", priority=priority)
    for place in range(30):
        await door.come(f"urgent{place}")
    await door.drain()
    assert door.entered.index("patient") == 1 + 8


async def test_a_more_urgent_request_goes_first() -> None:
    door = Door(running=1)
    await door.come("first")
    for name, priority in (("background", BACKGROUND), ("prewarm", PREWARM), ("interactive", INTERACTIVE)):
        await door.come(name, priority=priority)
    assert await door.drain() == ["first", "interactive", "prewarm", "background"]


async def test_a_thousand_requests_of_one_tenant_do_not_push_back_the_one_of_another() -> None:
    door = Door(running=1)
    await door.come("first")
    for place in range(1000):
        await door.come(f"many{place}", tenant="crowd")
    await door.end("first")
    await door.come("one", tenant="single")
    await door.drain()
    assert door.entered.index("one") == 2
    assert len(door.entered) == 1002


async def test_inside_a_tenant_policies_share_alike() -> None:
    door = Door(running=1)
    await door.come("first", C)
    for place in range(30):
        await door.come(f"A{place}", A)
    for place in range(3):
        await door.come(f"B{place}", B)
    await door.drain()
    assert [door.entered.index(f"B{place}") for place in range(3)] == [2, 4, 6]


async def test_the_revisions_of_one_policy_are_one_share() -> None:
    door = Door(running=1, slots=9)
    await door.come("first", C)
    for place in range(6):
        await door.come(f"A{place}", f"acme/a@{place + 1}")
    await door.come("B", B)
    await door.drain()
    assert door.entered.index("B") == 2


async def test_a_tenant_is_charged_for_tokens_not_for_requests() -> None:
    """5 times the tokens per request: a fifth of the turns."""
    door = Door(running=1)
    await door.come("first")
    for place in range(4):
        await door.come(f"L{place}", tenant="large", cost=50)
    for place in range(40):
        await door.come(f"S{place}", tenant="small", cost=10)
    await door.drain()
    assert runs(door.entered[1:9]) == [("L", 1), ("S", 5), ("L", 1), ("S", 1)]


async def test_nobody_saves_up_turns_by_being_idle() -> None:
    door = Door(running=1)
    await door.come("first")
    for place in range(20):
        await door.come(f"A{place}", tenant="busy")
    await door.end("first", *[f"A{place}" for place in range(9)])
    for place in range(5):
        await door.come(f"B{place}", tenant="idle")
    await door.drain()
    assert max(length for letter, length in runs(door.entered[door.entered.index("B0") :]) if letter == "B") == 1


async def test_the_queue_is_bounded_and_says_position_and_expected_wait() -> None:
    door = Door(running=1, waiting=4)
    await door.come("r0")
    for place in range(1, 5):
        await door.come(f"r{place}")
    with pytest.raises(QueueFull, match="1 requests run, 4 wait") as refused:
        await door.come("early")
    assert (refused.value.status, refused.value.queue_position, refused.value.expected_wait_s) == (503, 5, None)
    for place in range(2):
        door.clock.now += 3.0
        await door.end(f"r{place}")
        await door.come(f"more{place}")
    with pytest.raises(QueueFull) as refused:
        await door.come("late")
    assert (refused.value.queue_position, refused.value.expected_wait_s) == (5, 15.0)
    assert refused.value.retry_after_s == 15.0
    assert door.turns.waiting == 4


async def test_background_requests_leave_half_of_the_queue_to_people() -> None:
    door = Door(running=1, waiting=4)
    await door.come("first")
    for place in range(2):
        await door.come(f"b{place}", priority=BACKGROUND)
    with pytest.raises(QueueFull):
        await door.come("b2", priority=BACKGROUND)
    for place in range(2):
        await door.come(f"i{place}")
    with pytest.raises(QueueFull):
        await door.come("i2")


async def test_a_wait_ends_with_its_bound_and_gives_its_place_back() -> None:
    door = Door(running=1)
    await door.come("first")
    await door.come("next")
    await door.come("late", wait_s=0.01)
    with pytest.raises(QueueFull, match=r"no turn came within 0\.01 s") as late:
        await door.tasks["late"]
    assert late.value.queue_position == 2
    assert door.turns.waiting == 1
    assert await door.drain() == ["first", "next"]
    assert nothing_is_left(door.turns)


async def test_a_waiting_request_that_is_cancelled_frees_its_place_and_lets_others_by() -> None:
    door = Door(running=4)
    await door.come("s1")
    await door.come("large", n=4)
    await door.come("s2")
    assert door.entered == ["s1"]
    door.tasks["large"].cancel()
    await settle()
    assert door.entered == ["s1", "s2"]
    await door.drain()
    assert nothing_is_left(door.turns)


async def test_a_request_cancelled_just_as_its_turn_comes_gives_the_turn_back() -> None:
    door = Door(running=1)
    await door.come("first")
    await door.come("second")
    door.turns.release(door.tasks["first"].result())
    door.tasks["second"].cancel()
    await settle()
    assert door.tasks["second"].cancelled()
    assert nothing_is_left(door.turns)


async def test_a_turn_is_given_back_once() -> None:
    door = Door(running=1)
    for name in ("a", "b", "c"):
        await door.come(name)
    await door.end("a", "a")
    assert (door.entered, door.turns.requests) == (["a", "b"], 1)


async def test_the_engine_is_given_the_order_of_the_turns_and_8_later_ones_pass_per_class() -> None:
    door = Door(running=64)
    await door.come("background", priority=BACKGROUND)
    for place in range(20):
        await door.come(f"i{place}")
    rank = {name: task.result().rank for name, task in door.tasks.items()}
    assert sorted(rank, key=lambda name: rank[name]).index("background") in (15, 16)
    assert rank["i0"] < rank["i1"]
