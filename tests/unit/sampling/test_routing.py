"""Where a request goes, given what replicas announce and what its caller knows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import pytest

from shared.residency import Replica
from shared.sampling.routing import C, Mine, load_of, order, score
from tests.sampling_stack import announced, having

A = "acme/adder@1"
KEYS = [f"acme/p{i}@1" for i in range(4000)]


def _names(replicas: Iterable[Replica]) -> list[str]:
    return [replica.replica for replica in replicas]


def _fleet(count: int) -> list[Replica]:
    return [announced(f"r-{i}") for i in range(count)]


def _homes(replicas: list[Replica]) -> dict[str, str]:
    return {key: order(replicas, key, {})[0].replica for key in KEYS}


def test_a_ready_replica_is_asked_first_and_of_these_the_least_loaded() -> None:
    idle = announced("idle")
    busy = announced("busy", ready=having("acme/other@1", A), in_flight=3)
    busier = announced("busier", ready=having(A), in_flight=3, loads=1)
    other = announced("other", ready=having("acme/other@1"))
    assert _names(order([busier, idle, busy, other], A, {}))[:2] == ["busy", "busier"]
    assert _names(order([idle, busier], A, {}, tried={"busier"})) == ["idle"]


@pytest.mark.parametrize("revision", [A, None])
def test_equals_take_turns(revision: str | None) -> None:
    replicas = [announced(f"r-{i}", ready=having(A)) for i in range(3)]
    firsts = [order(replicas, revision, {}, turn=turn)[0].replica for turn in range(6)]
    assert firsts == ["r-0", "r-1", "r-2"] * 2


def test_what_this_caller_asked_since_the_announcement_counts() -> None:
    replicas = [announced("a", ready=having(A), in_flight=2), announced("b", ready=having(A), in_flight=3)]
    assert order(replicas, A, {"a": Mine(open=2, since=2)})[0].replica == "b"
    assert order(replicas, A, {"b": Mine(open=0, since=-2)})[0].replica == "b"
    assert order(replicas, None, {"a": Mine(open=2, since=2)})[0].replica == "b"


def test_the_load_is_requests_and_cold_loads_and_never_less_than_what_one_has_there_oneself() -> None:
    replica = announced("a", in_flight=5, waiting=2, loads=3)
    assert load_of(replica, Mine()) == 8
    assert load_of(replica, Mine(open=1, since=-2)) == 3 + 3
    assert load_of(replica, Mine(open=4, since=-2)) == 4 + 3
    assert load_of(replica, Mine(open=9, since=1)) == 9 + 3
    assert load_of(announced("a"), Mine(open=0, since=-2)) == 0


def test_the_base_goes_to_the_least_loaded() -> None:
    replicas = [announced("a", in_flight=4), announced("b", in_flight=1), announced("c", in_flight=1, loads=1)]
    assert _names(order(replicas, None, {})) == ["b", "c", "a"]


def test_a_crowded_replica_is_relieved_only_by_one_that_has_less_to_do() -> None:
    crowd = announced("crowd", ready=having(A), in_flight=20, waiting=4)
    assert order([crowd, announced("idle")], A, {})[0].replica == "idle"
    assert order([crowd, announced("as-busy", in_flight=19)], A, {})[0].replica == "crowd"
    assert order([crowd], A, {})[0].replica == "crowd"
    served_at_once = crowd.model_copy(update={"waiting": 3})
    assert order([served_at_once, announced("idle")], A, {})[0].replica == "crowd"
    shared = [crowd, announced("ready-too", ready=having(A), in_flight=19, waiting=4), announced("idle")]
    assert _names(order(shared, A, {})) == ["idle", "ready-too", "crowd"]


def test_callers_without_shared_state_send_a_first_touch_to_one_place() -> None:
    """4,000 first touches, two callers: each with its own turn, its own open requests, and its own order of reading."""
    replicas = _fleet(5)
    mine = {replica.replica: Mine(open=i % 4, since=i % 4) for i, replica in enumerate(replicas)}
    for turn, key in enumerate(KEYS):
        assert order(replicas, key, {}, turn=0)[0] == order(replicas[::-1], key, mine, turn=turn)[0]


def test_a_replica_that_leaves_moves_its_own_revisions_and_no_others() -> None:
    replicas = _fleet(5)
    before = _homes(replicas)
    assert Counter(before.values()) == {"r-0": 801, "r-1": 813, "r-2": 779, "r-3": 818, "r-4": 789}
    for gone, had in (("r-4", 789), ("r-2", 779)):
        after = _homes([replica for replica in replicas if replica.replica != gone])
        moved = {key for key in KEYS if before[key] != after[key]}
        assert len(moved) == had
        assert moved == {key for key in KEYS if before[key] == gone}


def test_a_replica_that_comes_takes_its_share_and_moves_nothing_else() -> None:
    before, after = _homes(_fleet(5)), _homes(_fleet(6))
    moved = [key for key in KEYS if before[key] != after[key]]
    assert len(moved) == 663
    assert {after[key] for key in moved} == {"r-5"}


def test_the_weight_is_the_same_in_every_process() -> None:
    assert score(A, "mini-0") == 6557243419584721399
    assert score(A, "mini-0") != score("acme/adder@11", "mini-0")


def test_a_replica_over_the_bound_is_passed_over_for_the_next_in_hash_order() -> None:
    replicas = _fleet(4)
    by_hash = _names(order(replicas, A, {}))
    assert by_hash == sorted(by_hash, key=lambda name: -score(A, name))
    # Mean 6, with the new request 6.25, and the bound is 1.25 times that, rounded up: 8.
    loads = dict(zip(by_hash, (8, 7, 5, 4), strict=True))
    announce = [r.model_copy(update={"in_flight": loads[r.replica]}) for r in replicas]
    assert _names(order(announce, A, {})) == [*by_hash[1:], by_hash[0]]
    fewer = [r.model_copy(update={"in_flight": min(loads[r.replica], 7)}) for r in replicas]
    assert _names(order(fewer, A, {})) == by_hash


def test_no_replica_gets_more_than_c_times_the_mean() -> None:
    """1,000 first touches that all stay: at every step the fullest holds at most ⌈1.25 × mean⌉."""
    assert C == 1.25
    replicas = [announced(f"r-{i}", slots=1) for i in range(7)]
    held: Counter[str] = Counter()
    for count, key in enumerate(KEYS[:1000], start=1):
        mine = {name: Mine(open=n, since=n) for name, n in held.items()}
        held[order(replicas, key, mine)[0].replica] += 1
        assert max(held.values()) <= math.ceil(1.25 * count / 7)
    unbounded = Counter(order(replicas, key, {})[0].replica for key in KEYS[:1000])
    assert held != unbounded
    assert sum(held.values()) == 1000


def test_a_load_under_way_draws_the_revision_even_over_the_bound() -> None:
    first, second = order([announced("a"), announced("b")], A, {})
    loading = second.model_copy(update={"prewarming": ("acme/other@1", A), "in_flight": 50, "waiting": 50, "loads": 9})
    assert order([first, loading], A, {})[0].replica == second.replica
    assert order([first, loading], "acme/third@1", {})[0].replica == first.replica


def test_50_requests_for_one_cold_revision_go_to_one_replica_before_it_has_said_a_word() -> None:
    replicas = _fleet(3)
    went: Counter[str] = Counter()
    for turn in range(50):
        mine = {name: Mine(open=n, since=n, asking=True) for name, n in went.items()}
        went[order(replicas, A, mine, turn=turn)[0].replica] += 1
    assert list(went.values()) == [50]


@pytest.mark.parametrize("revision", [A, None])
def test_a_replica_put_aside_is_asked_last_and_still_asked_when_there_is_no_other(revision: str | None) -> None:
    lost = announced("lost", ready=having(A))
    others = [announced("busy", in_flight=30), announced("idle")]
    aside = {"lost": Mine(aside=True)}
    assert _names(order([lost, *others], revision, aside))[-1] == "lost"
    assert _names(order([lost], revision, aside)) == ["lost"]


def test_a_replica_put_aside_is_not_part_of_the_mean() -> None:
    first, second, third = order(_fleet(3), A, {})
    dead = third.model_copy(update={"in_flight": 300})
    full = first.model_copy(update={"in_flight": 10})
    assert order([full, second, dead], A, {})[0].replica == first.replica
    assert order([full, second, dead], A, {dead.replica: Mine(aside=True)})[0].replica == second.replica


def test_nobody_is_nobody() -> None:
    assert order([], A, {}, turn=7) == []
    assert order(_fleet(2), A, {}, tried={"r-0", "r-1"}) == []
