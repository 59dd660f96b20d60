"""Limits per tenant and policy: what is refused, with which Retry-After, and that it is true."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from services.serving.config import ServingSettings
from services.serving.errors import RateLimited
from services.serving.limits import KEPT_IDLE, Bound, LimitSettings, RequestLimits

OPEN = Bound()


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limits(
    clock: Clock, tenant: Bound = OPEN, policy: Bound = OPEN, named: dict[str, Bound] | None = None
) -> RequestLimits:
    return RequestLimits(LimitSettings(tenant, policy, named or {}), clock)


def once(limits: RequestLimits, tenant: str = "acme", revision: str | None = "acme/a@1") -> None:
    with limits.admit(tenant, revision):
        pass


def test_a_tenant_has_so_many_requests_here_and_another_is_not_concerned(clock: Clock) -> None:
    bounded = limits(clock, tenant=Bound(concurrency=2))
    with bounded.admit("acme", "acme/a@1"), bounded.admit("acme", None):
        with pytest.raises(RateLimited, match="acme has 2 requests here, its limit") as refused:
            once(bounded, revision="acme/b@1")
        assert (refused.value.status, refused.value.code, refused.value.reason) == (429, "rate_limited", "concurrency")
        once(bounded, tenant="other")
    once(bounded)


def test_a_policy_is_bounded_over_all_its_revisions_and_callers(clock: Clock) -> None:
    bounded = limits(clock, policy=Bound(concurrency=2))
    with bounded.admit("acme", "acme/a@1"), bounded.admit("other", "acme/a@2"):
        with pytest.raises(RateLimited, match="acme/a has 2"):
            once(bounded, tenant="third", revision="acme/a@3")
        once(bounded, revision="acme/b@1")
        once(bounded, revision=None)


def test_the_systems_own_requests_have_no_limit(clock: Clock) -> None:
    bounded = limits(clock, Bound(concurrency=1, rate=1), Bound(concurrency=1, rate=1))
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(bounded.admit("", "acme/a@1"))
        once(bounded)


def test_a_rate_allows_its_burst_and_says_when_the_next_may_come(clock: Clock) -> None:
    bounded = limits(clock, tenant=Bound(rate=2.0, burst=3))
    for _ in range(3):
        once(bounded)
    with pytest.raises(RateLimited, match="2 requests per second") as refused:
        once(bounded)
    assert (refused.value.reason, refused.value.retry_after_s) == ("rate", 0.5)
    clock.now += 0.25
    with pytest.raises(RateLimited) as refused:
        once(bounded)
    assert refused.value.retry_after_s == 0.25
    clock.now += 0.25
    once(bounded)
    clock.now += 1000
    for _ in range(3):
        once(bounded)
    with pytest.raises(RateLimited):
        once(bounded)


def test_a_slow_rate_is_waited_for_as_long_as_it_takes(clock: Clock) -> None:
    bounded = limits(clock, policy=Bound(rate=0.1))
    once(bounded)
    with pytest.raises(RateLimited) as refused:
        once(bounded)
    assert refused.value.retry_after_s == pytest.approx(10.0)
    clock.now += refused.value.retry_after_s + 1e-6
    once(bounded)


def test_a_refused_request_takes_nothing_of_any_limit(clock: Clock) -> None:
    bounded = limits(clock, Bound(concurrency=5, rate=1.0, burst=2), Bound(concurrency=1))
    with bounded.admit("acme", "acme/a@1"):
        for _ in range(10):
            with pytest.raises(RateLimited, match="acme/a has 1"):
                once(bounded)
    once(bounded)


def test_the_wait_for_a_place_is_reckoned_from_how_long_requests_took(clock: Clock) -> None:
    bounded = limits(clock, tenant=Bound(concurrency=2))
    with bounded.admit("acme", None):
        clock.now += 8.0
    with bounded.admit("acme", None), bounded.admit("acme", None), pytest.raises(RateLimited) as refused:
        once(bounded)
    assert refused.value.retry_after_s == 4.0


def test_names_override_the_general_limits_field_by_field(clock: Clock) -> None:
    named = {"big": Bound(concurrency=3), "big/free": Bound(concurrency=0, rate=0)}
    bounded = limits(clock, Bound(concurrency=1, rate=1.0, burst=3), Bound(concurrency=1, rate=0.001), named)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(bounded.admit("big", "big/free@1"))
        with pytest.raises(RateLimited, match="big has 3"):
            once(bounded, "big", "big/free@1")
    with pytest.raises(RateLimited, match="big may send 1 requests per second"):
        once(bounded, "big", "big/free@1")


def test_names_that_are_idle_are_forgotten(clock: Clock) -> None:
    bounded = limits(clock, tenant=Bound(concurrency=1, rate=1000.0))
    with bounded.admit("stays", None):
        for place in range(5 * KEPT_IDLE):
            clock.now += 1.0
            once(bounded, f"t{place}", None)
        assert len(bounded._meters) <= KEPT_IDLE + 1
        with pytest.raises(RateLimited, match="stays"):
            once(bounded, "stays", None)


def test_limits_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_SERVING_BASE", "base")
    monkeypatch.setenv("MINT_SERVING_LIMITS", '{"acme": {"rate": 5, "burst": 10}, "acme/a": {"concurrency": 8}}')
    settings = ServingSettings()
    assert settings.serving_limits == {"acme": Bound(rate=5, burst=10), "acme/a": Bound(concurrency=8)}
    assert (settings.serving_tenant_concurrency, settings.serving_policy_concurrency) == (512, 256)
    assert (settings.serving_tenant_rate, settings.serving_policy_rate) == (0, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "it is no JSON"),
        ('{"acme/a@1": {"rate": 1}}', "'acme/a@1' is neither a tenant nor tenant/policy"),
        ('{"acme": {"rate": -1}}', "acme.rate"),
        ('{"acme": {"speed": 1}}', "acme.speed"),
        ('{"acme": 5}', "acme"),
    ],
)
def test_limits_that_cannot_be_are_refused_at_boot_with_words(
    monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.setenv("MINT_SERVING_BASE", "base")
    monkeypatch.setenv("MINT_SERVING_LIMITS", text)
    with pytest.raises(ValidationError) as refused:
        ServingSettings()
    assert "serving_limits" in str(refused.value)
    assert words in str(refused.value)


def test_a_sweep_of_idle_names_leaves_those_of_the_request_that_is_let_in(clock: Clock) -> None:
    bounded = limits(clock, tenant=Bound(concurrency=1))
    once(bounded, "stays", None)
    bounded._sweep_at = len(bounded._meters)
    with bounded.admit("stays", "acme/new@1"), pytest.raises(RateLimited, match="stays has 1"):
        once(bounded, "stays", None)
