"""Group-relative advantages against the numbers of the formula."""

from __future__ import annotations

import random
import statistics

import pytest

from shared.rl.advantages import group_advantages, is_degenerate
from shared.rl.seeds import derive_seed

BASELINES = ["std", "no_std", "leave_one_out"]


@pytest.mark.parametrize("baseline", BASELINES)
def test_equal_rewards_give_zeros(baseline):
    """trl#2565: [1, 1, 1, 1] → 0s, exactly, whatever the rounding of the mean."""
    assert group_advantages([1.0, 1.0, 1.0, 1.0], baseline) == [0.0] * 4
    assert group_advantages([0.1, 0.1, 0.1], baseline) == [0.0] * 3
    assert is_degenerate([0.1, 0.1, 0.1])


@pytest.mark.parametrize("baseline", BASELINES)
def test_one_sample_has_no_baseline(baseline):
    """trl#2565: one sample → refused."""
    with pytest.raises(ValueError, match="group of 1 has no baseline"):
        group_advantages([1.0], baseline)


def test_the_deviation_has_ddof_1():
    """trl#2565: [1, 0, 0, 1] → ±0.866, and the 1e-4 shrinks that by its share."""
    wanted = [0.8660254037844386, -0.8660254037844386, -0.8660254037844386, 0.8660254037844386]
    assert group_advantages([1, 0, 0, 1], epsilon=0.0) == pytest.approx(wanted, rel=1e-12)
    assert [round(a, 3) for a in group_advantages([1, 0, 0, 1])] == [0.866, -0.866, -0.866, 0.866]
    std = statistics.stdev([1, 0, 0, 1])
    assert group_advantages([1, 0, 0, 1])[0] == pytest.approx(0.5 / (std + 1e-4), rel=1e-12)


def test_without_a_deviation_and_against_the_others():
    """[4, 1, 1]: mean 2; the means of the others are 1, 2.5 and 2.5."""
    assert group_advantages([4, 1, 1], "no_std") == pytest.approx([2.0, -1.0, -1.0], rel=1e-12)
    assert group_advantages([4, 1, 1], "leave_one_out") == pytest.approx([3.0, -1.5, -1.5], rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_random_groups_equal_the_formulas(seed):
    rng = random.Random(seed)
    rewards = [rng.gauss(0, 3) for _ in range(rng.randint(2, 12))]
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    others = [statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
    wanted = {
        "std": [(r - mean) / (std + 1e-4) for r in rewards],
        "no_std": [r - mean for r in rewards],
        "leave_one_out": [r - other for r, other in zip(rewards, others, strict=True)],
    }
    for baseline, values in wanted.items():
        assert group_advantages(rewards, baseline) == pytest.approx(values, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(reward):
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, reward])


def test_rewards_too_large_to_compare_are_refused():
    with pytest.raises(ValueError, match="rewards up to 1e\\+200 are too large"):
        group_advantages([1e200, -1e200, 0.0])
    with pytest.raises(ValueError, match="too large"):
        group_advantages([1.5e308, -1.5e308], "leave_one_out")


def test_seeds_keep_their_parts_apart():
    seeds = {derive_seed("a", "b"), derive_seed("ab"), derive_seed("a", 1), derive_seed("a", "1"), derive_seed(1, "a")}
    assert len(seeds) == 5
    assert derive_seed(7, "adapter-init") == derive_seed(7, "adapter-init")
    assert all(0 <= seed < 2**63 for seed in seeds)
