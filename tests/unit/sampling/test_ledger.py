"""What a caller remembers of replicas between their announcements."""

from __future__ import annotations

from shared.residency import REPLICA_TTL_S
from shared.sampling.ledger import ASIDE_S, Ledger
from shared.sampling.routing import Mine
from tests.sampling_stack import announced

A = "acme/adder@1"


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_count_from_the_last_announcement_on() -> None:
    ledger, replica = Ledger(_Clock()), announced("r", at=1.0)
    ledger.hear([replica])
    ledger.enter(replica, A)
    ledger.enter(replica, None)
    assert ledger.mine([replica], None)["r"] == Mine(open=2, since=2, asking=True)
    later = announced("r", at=2.0, in_flight=2)
    ledger.hear([later])
    assert ledger.mine([later], A)["r"] == Mine(open=2, since=0, asking=True)
    ledger.leave(replica, A)
    assert ledger.mine([later], A)["r"] == Mine(open=1, since=-1, asking=False)
    ledger.enter(later, "acme/other@1")
    ledger.hear([later])
    assert ledger.mine([later], A)["r"] == Mine(open=2, since=0, asking=False)


def test_a_suspicion_ends_after_its_time() -> None:
    clock, replica = _Clock(), announced("r")
    ledger = Ledger(clock)
    ledger.put_aside(replica)
    clock.now += ASIDE_S - 0.1
    assert ledger.mine([replica], A)["r"].aside
    clock.now += 0.1
    assert not ledger.mine([replica], A)["r"].aside
    assert ASIDE_S < REPLICA_TTL_S


def test_a_suspicion_ends_with_the_announcement_of_another_boot_and_not_with_one_of_the_same() -> None:
    ledger, replica = Ledger(_Clock()), announced("r", at=1.0)
    ledger.put_aside(replica)
    again = announced("r", at=2.0)
    ledger.hear([again])
    assert ledger.mine([again], A)["r"].aside
    reborn = announced("r", at=3.0, boot_id="second")
    ledger.hear([reborn])
    assert not ledger.mine([reborn], A)["r"].aside
    assert not ledger.mine([announced("other")], A)["other"].aside


def test_a_replica_that_is_gone_is_forgotten_once_nothing_of_it_is_left() -> None:
    clock, replica = _Clock(), announced("r")
    ledger = Ledger(clock)
    ledger.hear([replica])
    ledger.enter(replica, A)
    ledger.hear([])
    ledger.leave(replica, A)
    ledger.put_aside(replica)
    ledger.hear([])
    assert list(ledger._pages) == ["r"]
    clock.now += ASIDE_S
    ledger.hear([])
    assert ledger._pages == {}
