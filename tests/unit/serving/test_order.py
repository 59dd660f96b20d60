"""Which cold load goes next: urgent classes, turns of tenants, and nobody last for ever."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from services.serving.order import OVERTAKES, Order, class_of
from shared.sampling.port import BACKGROUND, INTERACTIVE, PREWARM

_ARRIVALS = itertools.count()


@dataclass(eq=False)
class Wanted:
    name: str
    urgency: int
    tenants: frozenset[str]
    arrived: int


def _load(name: str, urgency: int = INTERACTIVE, *tenants: str) -> Wanted:
    return Wanted(name, urgency, frozenset(tenants or {name[0]}), next(_ARRIVALS))


def _names(order: Order, loads: list[Wanted]) -> list[str]:
    return [load.name for load in order.upcoming(loads)]


def _start(order: Order, loads: list[Wanted]) -> Wanted:
    first = next(order.upcoming(loads))
    loads.remove(first)
    order.started(first, loads)
    return first


@pytest.mark.parametrize(
    ("priority", "urgency"),
    [
        (-7, INTERACTIVE),
        (0, INTERACTIVE),
        (4, INTERACTIVE),
        (5, PREWARM),
        (9, PREWARM),
        (10, BACKGROUND),
        (99, BACKGROUND),
    ],
)
def test_any_priority_is_one_of_three_classes(priority: int, urgency: int) -> None:
    assert class_of(priority) == urgency


def test_urgent_classes_go_first_and_inside_one_the_oldest() -> None:
    loads = [
        _load("a1", BACKGROUND),
        _load("a2", PREWARM),
        _load("a3", INTERACTIVE),
        _load("a4", PREWARM),
        _load("a5", INTERACTIVE),
    ]
    assert _names(Order(), loads) == ["a3", "a5", "a2", "a4", "a1"]


def test_tenants_of_a_class_take_turns() -> None:
    loads = [_load("a1"), _load("a2"), _load("a3"), _load("b1"), _load("c1"), _load("b2")]
    assert _names(Order(), loads) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_tenant_that_had_a_turn_waits_for_the_others_also_for_those_that_come_later() -> None:
    order, loads = Order(), [_load("a1"), _load("a2"), _load("b1")]
    assert [_start(order, loads).name, _start(order, loads).name] == ["a1", "b1"]
    loads.append(_load("c1"))
    assert _names(order, loads) == ["c1", "a2"]


def test_a_load_that_two_tenants_wait_for_goes_once_in_the_turn_of_whoever_is_first() -> None:
    order = Order()
    loads = [_load("a1"), _load("a2"), _load("shared", INTERACTIVE, "a", "b")]
    assert _names(order, loads) == ["a1", "shared", "a2"]


def test_a_background_load_goes_after_8_overtakes() -> None:
    order = Order()
    loads = [_load("background", BACKGROUND)]
    started = []
    for number in range(20):
        loads.append(_load(f"urgent{number}"))
        started.append(_start(order, loads).name)
    assert OVERTAKES == 8
    assert started.index("background") == 8
    assert "background" not in started[9:]


def test_no_load_is_overtaken_more_than_its_place_in_its_class_allows() -> None:
    """The p-th load of a class: at most 9 · p overtakes, whatever comes."""
    draw = random.Random(4)
    for _ in range(20):
        order, loads = Order(), list[Wanted]()
        place: dict[str, int] = {}
        passed: dict[str, int] = {}
        for step in range(200):
            for count in range(draw.choice((0, 1, 1, 2)) if len(loads) < 64 else 0):
                load = _load(f"t{step}.{count}", draw.choice((INTERACTIVE, INTERACTIVE, PREWARM, BACKGROUND)))
                loads.append(load)
                place[load.name] = sum(other.urgency == load.urgency for other in loads)
                passed[load.name] = 0
            if not loads:
                continue
            first = _start(order, loads)
            for other in loads:
                passed[other.name] += first.urgency < other.urgency
            assert passed[first.name] <= 9 * place[first.name]


def test_the_order_told_is_the_order_kept() -> None:
    draw = random.Random(5)
    for _ in range(50):
        order = Order()
        loads = [
            _load(f"{draw.choice('abcd')}{number}", draw.choice((INTERACTIVE, PREWARM, BACKGROUND)))
            for number in range(40)
        ]
        told = _names(order, loads)
        kept = [_start(order, loads).name for _ in range(40)]
        assert told == kept


def test_first_time_tenants_without_end_do_not_pass_by_one_that_was_served() -> None:
    order, loads = Order(), [_load("a1")]
    assert _start(order, loads).name == "a1"
    loads += [_load("a2"), _load("b1")]
    started = []
    for number in range(30):
        loads.append(_load(f"new{number}", INTERACTIVE, f"t{number}"))
        started.append(_start(order, loads).name)
    assert started.index("a2") == OVERTAKES == 8


def test_the_p_th_load_of_a_class_goes_within_9_p_of_its_turns() -> None:
    draw = random.Random(6)
    order, loads = Order(), [_load(f"a{number}") for number in range(5)]
    turns = dict.fromkeys([load.name for load in loads], 0)
    for step in range(100):
        loads.append(_load(f"new{step}", INTERACTIVE, f"t{step}", draw.choice("xyz")))
        first = _start(order, loads).name
        turns = {name: turn + 1 for name, turn in turns.items()}
        if first in turns:
            assert turns.pop(first) <= 9 * (int(first[1]) + 1)
    assert not turns


def test_the_order_told_is_the_order_kept_for_shared_loads_too() -> None:
    draw = random.Random(8)
    for _ in range(50):
        order = Order()
        loads = [
            _load(f"l{number}", INTERACTIVE, *draw.sample("abcdef", draw.choice((1, 1, 2)))) for number in range(40)
        ]
        told = _names(order, loads)
        assert told == [_start(order, loads).name for _ in range(40)]
