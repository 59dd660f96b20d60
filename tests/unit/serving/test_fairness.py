"""The order among the waiting, without an engine: shares that idle, are barred, or give up."""

from __future__ import annotations

import itertools
import random

from services.serving.fairness import SPARE, Ask, Waiting
from services.serving.order import CLASSES, OVERTAKES
from shared.sampling.port import BACKGROUND, INTERACTIVE

NUMBERS = itertools.count(1)


def ask(tenant: str, revision: str | None = None, urgency: int = INTERACTIVE, cost: int = 10) -> Ask:
    return Ask(next(NUMBERS), tenant, revision or f"{tenant}/p@1", urgency, 1, cost)


def taken(waiting: Waiting, count: int, among: tuple[str, ...] = ()) -> str:
    """The tenants of the next `count` turns; with `among`, only these revisions may enter."""
    return "".join(next_of(waiting, among).tenant for _ in range(count))


def next_of(waiting: Waiting, among: tuple[str, ...] = ()) -> Ask:
    first = waiting.first_of(among, lambda ask: True) if among else waiting.first()
    assert first is not None
    waiting.take(first)
    return first


def filled(*asks: Ask) -> Waiting:
    waiting = Waiting()
    for one in asks:
        waiting.add(one)
    return waiting


def test_a_tenant_that_was_barred_for_long_goes_first_once_and_not_until_it_caught_up() -> None:
    waiting = filled(*[ask("x") for _ in range(30)], *[ask("y") for _ in range(60)])
    assert taken(waiting, 20, among=("y/p@1",)) == "y" * 20
    waiting.add(ask("v"))
    assert taken(waiting, 6) == "xvxyxy"


def test_a_policy_that_was_barred_for_long_goes_first_once_in_its_tenant() -> None:
    barred, other = [ask("t", "t/a@1") for _ in range(30)], [ask("t", "t/b@1") for _ in range(60)]
    waiting = filled(*barred, *other)
    taken(waiting, 20, among=("t/b@1",))
    waiting.add(ask("t", "t/c@1"))
    assert [next_of(waiting).revision for _ in range(5)] == ["t/a@1", "t/c@1", "t/a@1", "t/b@1", "t/a@1"]


def test_looking_among_all_revisions_finds_the_same_as_looking_at_all() -> None:
    draw = random.Random(7)
    names = ["p/a@1", "p/a@2", "p/b@1", "q/c@1"]
    waiting = filled()
    for _ in range(400):
        if len(waiting) < 30 or draw.random() < 0.5:
            urgency, cost = draw.choice(CLASSES), draw.randint(1, 50)
            waiting.add(ask(draw.choice("xyz"), draw.choice(names), urgency, cost))
            continue
        first = waiting.first()
        assert first is waiting.first_of(names, lambda ask: True)
        assert first is not None
        waiting.take(first)


def test_an_endless_row_of_newcomers_passes_nobody_by() -> None:
    """The p-th to come has its turn within p x 9 of its class, here the third within 27."""
    waiting = filled(*[ask("old") for _ in range(3)])
    order = ""
    for place in range(27):
        for newcomer in range(2):
            waiting.add(ask(f"n{place}.{newcomer}"))
        order += next_of(waiting).tenant[0]
    assert OVERTAKES + 1 == 9
    assert order.count("o") == 3
    assert "o" not in order[1:8]


def test_many_idle_shares_are_forgotten() -> None:
    waiting = filled(ask("stays"))
    for place in range(500):
        waiting.add(ask(f"t{place}", f"stays/p{place}@1"))
        waiting.add(ask("stays", f"stays/p{place}@1"))
        taken(waiting, 2)
    cls = waiting._classes[INTERACTIVE]
    assert len(cls.tenants) <= 2 * len(cls.asks) + SPARE + 1
    assert len(cls.tenants["stays"].policies) <= 2 * len(cls.asks) + SPARE + 1


def test_who_gives_up_is_not_charged() -> None:
    waiting = filled(*[ask("x", cost=1000) for _ in range(3)], *[ask("y") for _ in range(3)])
    first = waiting.first()
    assert first is not None
    waiting.remove(first)
    assert taken(waiting, 2) == "xy"


def test_where_a_class_is_barred_the_next_one_goes() -> None:
    waiting = filled(ask("x"), ask("b", urgency=BACKGROUND))
    assert taken(waiting, 1, among=("b/p@1",)) == "b"
    assert waiting.first_of(("b/p@1",), lambda ask: True) is None
    assert waiting.first_of(("x/p@1",), lambda ask: False) is None
    assert taken(waiting, 1) == "x"
    assert (len(waiting), waiting.first()) == (0, None)


def test_the_place_is_counted_among_those_that_are_at_least_as_urgent() -> None:
    first, background, last = ask("x"), ask("b", urgency=BACKGROUND), ask("x")
    waiting = filled(first, background, last)
    assert (waiting.ahead_of(last), waiting.ahead_of(background)) == (1, 1)
    assert (waiting.up_to(INTERACTIVE), waiting.up_to(BACKGROUND)) == (2, 3)
    assert waiting.most_urgent_beside(["x/p@1"]) == BACKGROUND
    assert waiting.most_urgent_beside(["b/p@1"]) == INTERACTIVE
    assert waiting.most_urgent_beside(["b/p@1", "x/p@1"]) is None
