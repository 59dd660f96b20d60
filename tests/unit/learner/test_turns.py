"""Turns at the base: in order of arrival, one at a time, no one forgotten and no one waited for in vain."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from services.learner.turns import Turns
from shared.errors import Fatal, Retryable


@dataclass(frozen=True)
class Ask:
    """`gate` holds its turn up; `checks` are called when it goes on."""

    name: str
    gate: threading.Event | None = None
    entered: threading.Event = field(default_factory=threading.Event)
    checks: tuple = ()

    def with_check(self, stopped):
        return replace(self, checks=(*self.checks, stopped))


class Base:
    """Notes who was in which turn, and that no two turns overlap."""

    def __init__(self, at_most=1, fail=()):
        self.log, self.ended, self.at_most, self.fail = [], [], at_most, set(fail)
        self._busy = threading.Lock()
        self.waited = []
        self.turns = Turns(self._work, self._together, self.waited.append)

    def _together(self, taken, following):
        return len(taken) < self.at_most and following.name not in {ask.name for ask in taken}

    def _work(self, asks):
        assert self._busy.acquire(blocking=False), "two turns at once"
        try:
            self.log.append([ask.name for ask in asks])
            return [self._one(ask) for ask in asks]
        finally:
            self.ended.append([ask.name for ask in asks])
            self._busy.release()

    def _one(self, ask):
        ask.entered.set()
        if ask.gate is not None:
            assert ask.gate.wait(10)
        if ask.name in self.fail:
            raise RuntimeError(f"{ask.name} broke the base")
        try:
            for check in ask.checks:
                check()
        except Retryable as error:
            return error
        return Fatal("a bad row") if ask.name.startswith("bad") else f"done {ask.name}"


async def _hold(base, name="first"):
    """A turn that has begun and goes on when its gate opens."""
    ask = Ask(name, threading.Event())
    task = asyncio.create_task(base.turns.take(ask))
    assert await asyncio.to_thread(ask.entered.wait, 10)
    return ask, task


async def _queue(base, *names):
    tasks = [asyncio.create_task(base.turns.take(Ask(name))) for name in names]
    await asyncio.sleep(0)
    return tasks


async def test_requests_are_served_in_the_order_in_which_they_came():
    base = Base()
    gate, first = await _hold(base)
    tasks = await _queue(base, *"abcdef")
    gate.gate.set()
    assert await asyncio.gather(first, *tasks) == [f"done {name}" for name in ("first", *"abcdef")]
    assert base.log == [["first"], *([name] for name in "abcdef")]
    assert len(base.waited) == 7
    assert all(seconds >= 0 for seconds in base.waited)


@pytest.mark.parametrize("at_most", [1, 2, 5])
async def test_five_policies_in_a_loop_get_a_turn_each_in_every_round(at_most):
    """No policy waits for more steps than there are others: 5 policies of 8 steps each, each asking again
    at once; between two steps of one at most 4 steps of the others begin."""
    base = Base(at_most)

    async def train(name):
        for _ in range(8):
            assert await base.turns.take(Ask(name)) == f"done {name}"

    await asyncio.gather(*(train(name) for name in "abcde"))
    order = [name for turn in base.log for name in turn]
    assert sorted(order) == sorted("abcde" * 8)
    for name in "abcde":
        at = [i for i, other in enumerate(order) if other == name]
        assert max(b - a - 1 for a, b in pairwise(at)) <= 4
    assert all(len(set(turn)) == len(turn) <= at_most for turn in base.log)


async def test_a_request_whose_turn_came_to_nothing_has_the_next_one():
    base = Base()
    gate, first = await _hold(base)
    tasks = await _queue(base, *"ab")
    again = asyncio.create_task(base.turns.take(Ask("again"), first=True))
    await asyncio.sleep(0)
    gate.gate.set()
    await asyncio.gather(first, *tasks, again)
    assert base.log == [["first"], ["again"], ["a"], ["b"]]


async def test_what_decides_who_joins_may_fail_and_the_next_turn_runs():
    base = Base()
    gate, first = await _hold(base)
    base.turns._together = lambda taken, following: 1 / 0
    tasks = await _queue(base, *"ab")
    gate.gate.set()
    with pytest.raises(ZeroDivisionError):
        await tasks[0]
    assert await asyncio.gather(first, tasks[1]) == ["done first", "done b"]


async def test_a_request_waits_for_no_step_that_came_after_it():
    """A policy that asks again and again does not pass one that waits."""
    base = Base()
    gate, first = await _hold(base, "greedy")
    (patient,) = await _queue(base, "patient")
    greedy = await _queue(base, "greedy", "greedy", "greedy")
    gate.gate.set()
    await asyncio.gather(first, patient, *greedy)
    assert base.log[:2] == [["greedy"], ["patient"]]


async def test_those_right_behind_join_a_turn_as_far_as_they_may():
    base = Base(at_most=3)
    gate, first = await _hold(base)
    tasks = await _queue(base, "a", "b", "a", "c", "d", "e", "f")
    gate.gate.set()
    await asyncio.gather(first, *tasks)
    assert base.log == [["first"], ["a", "b"], ["a", "c", "d"], ["e", "f"]]


async def test_each_gets_its_own_answer_and_an_error_is_its_own():
    base = Base(at_most=3)
    gate, first = await _hold(base)
    a, bad, c = await _queue(base, "a", "bad", "c")
    gate.gate.set()
    await first
    assert (await a, await c) == ("done a", "done c")
    with pytest.raises(Fatal, match="a bad row"):
        await bad
    assert base.log[1] == ["a", "bad", "c"]


async def test_what_the_work_raises_reaches_all_of_its_turn_and_the_next_turn_runs():
    base = Base(at_most=2, fail={"b"})
    gate, first = await _hold(base)
    a, b, c, d = await _queue(base, "a", "b", "c", "d")
    gate.gate.set()
    await first
    for failed in (a, b):
        with pytest.raises(RuntimeError, match="b broke the base"):
            await failed
    assert [await c, await d] == ["done c", "done d"]
    assert await base.turns.take(Ask("later")) == "done later"


async def test_a_cancelled_caller_is_answered_at_once_and_the_next_turn_waits_for_the_thread():
    base = Base()
    gate, first = await _hold(base)
    (following,) = await _queue(base, "following")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert base.ended == []
    for _ in range(20):
        await asyncio.sleep(0)
    assert base.log == [["first"]]
    gate.gate.set()
    assert await following == "done following"
    assert base.ended == [["first"], ["following"]]


async def test_a_cancelled_step_is_told_at_its_next_check_and_its_company_is_not():
    told = []
    base = Base(at_most=2)
    one = base._one

    def note(ask):
        outcome = one(ask)
        told.append((ask.name, str(outcome)))
        return outcome

    base._one = note
    gate, first = await _hold(base)
    b_gate = Ask("b", threading.Event())
    a = asyncio.create_task(base.turns.take(b_gate))
    (c,) = await _queue(base, "c")
    gate.gate.set()
    assert await asyncio.to_thread(b_gate.entered.wait, 10)
    a.cancel()
    with pytest.raises(asyncio.CancelledError):
        await a
    b_gate.gate.set()
    assert await c == "done c"
    assert await first == "done first"
    assert told[1:] == [("b", "the learner is shutting down; another one takes the step"), ("c", "done c")]
    assert base.log == [["first"], ["b", "c"]]


async def test_one_that_was_cancelled_while_it_waited_takes_no_turn():
    base = Base()
    gate, first = await _hold(base)
    a, b = await _queue(base, "a", "b")
    a.cancel()
    with pytest.raises(asyncio.CancelledError):
        await a
    gate.gate.set()
    await asyncio.gather(first, b)
    assert base.log == [["first"], ["b"]]
