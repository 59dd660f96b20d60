"""Group-relative advantages against the numbers of the formula."""

from __future__ import annotations

import statistics

import pytest

from shared.rl.advantages import group_advantages, is_degenerate
from shared.rl.seeds import derive_seed


def test_equal_rewards_give_zeros():
    """trl#2565: [1, 1, 1, 1] → 0s, exactly, whatever the rounding of the mean."""
    assert group_advantages([1.0, 1.0, 1.0, 1.0]) == [0.0] * 4
    assert group_advantages([0.1, 0.1, 0.1]) == [0.0] * 3
    assert is_degenerate([0.1, 0.1, 0.1])


def test_one_sample_has_no_baseline():
    """trl#2565: one sample → refused."""
    with pytest.raises(ValueError, match="group of 1 has no baseline"):
        group_advantages([1.0])


def test_the_deviation_has_ddof_1():
    """trl#2565: [1, 0, 0, 1] → ±0.866, and the 1e-4 shrinks that by its share."""
    wanted = [0.8660254037844386, -0.8660254037844386, -0.8660254037844386, 0.8660254037844386]
    assert group_advantages([1, 0, 0, 1], epsilon=0.0) == pytest.approx(wanted, rel=1e-12)
    std = statistics.stdev([1, 0, 0, 1])
    assert group_advantages([1, 0, 0, 1])[0] == pytest.approx(0.5 / (std + 1e-4), rel=1e-12)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(reward):
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, reward])


def test_seeds_keep_their_parts_apart():
    seeds = {derive_seed("a", "b"), derive_seed("ab"), derive_seed("a", 1), derive_seed("a", "1"), derive_seed(1, "a")}
    assert len(seeds) == 5
    assert derive_seed(7, "adapter-init") == derive_seed(7, "adapter-init")
    assert all(0 <= seed < 2**63 for seed in seeds)
