"""Activations are paced while requests run, and those who wait are told how long."""

from __future__ import annotations

import pytest

from services.serving.pace import FIRST_GUESS_S, LOOK_AGAIN_S, RECENT, Estimate, Pace, retry_after_s


class Time:
    def __init__(self) -> None:
        self.now = 100.0
        self.busy = True
        self.idle_at: float | None = None

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.idle_at is not None and self.now >= self.idle_at:
            self.busy = False

    def pace(self, share: float) -> Pace:
        return Pace(share, lambda: self.busy, self.clock, self.sleep)


async def _waited(time: Time, pace: Pace) -> float:
    before = time.now
    await pace.ready()
    return time.now - before


@pytest.mark.parametrize(("share", "pause"), [(0.5, 2.0), (0.25, 6.0), (0.8, 0.5), (1.0, 0.0)])
async def test_after_an_activation_of_2_s_the_next_waits_until_the_share_is_kept(share: float, pause: float) -> None:
    time = Time()
    pace = time.pace(share)
    assert await _waited(time, pace) == 0
    pace.spent(2.0)
    assert await _waited(time, pace) == pytest.approx(pause)
    assert await _waited(time, pace) == 0


async def test_nobody_waits_while_no_request_runs() -> None:
    time = Time()
    pace = time.pace(0.1)
    time.busy = False
    pace.spent(2.0)
    assert await _waited(time, pace) == 0
    assert pace.stretch() == 1.0


async def test_a_pause_ends_when_the_last_request_ends() -> None:
    time = Time()
    pace = time.pace(0.5)
    pace.spent(10.0)
    time.idle_at = time.now + 1.0
    assert await _waited(time, pace) == pytest.approx(1.0, abs=LOOK_AGAIN_S + 1e-6)


async def test_activations_side_by_side_share_one_pace() -> None:
    time = Time()
    pace = time.pace(0.5)
    pace.spent(2.0)
    pace.spent(2.0)
    assert await _waited(time, pace) == pytest.approx(4.0)
    assert pace.stretch() == 2.0


def test_the_estimate_is_the_median_of_the_recent_activations() -> None:
    estimate = Estimate()
    assert estimate.each_s() == FIRST_GUESS_S == 1.0
    for seconds in (3.0, 0.5, 100.0):
        estimate.add(seconds)
    assert estimate.each_s() == 3.0
    for _ in range(RECENT):
        estimate.add(0.25)
    assert estimate.each_s() == 0.25


@pytest.mark.parametrize(("expected", "retry"), [(0.01, 1.0), (7.5, 7.5), (900.0, 60.0)])
def test_retry_after_is_the_expected_wait_between_1_and_60_s(expected: float, retry: float) -> None:
    assert retry_after_s(expected) == retry
