"""Group-relative advantages: rewards of one prompt's trajectories in, one number per trajectory out.

Invariant: a group that teaches nothing (all rewards equal) has advantages of exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

STD_EPSILON = 1e-4

Baseline = Literal["std", "no_std", "leave_one_out"]


def group_advantages(rewards: Sequence[float], baseline: Baseline = "std", epsilon: float = STD_EPSILON) -> list[float]:
    """Of each trajectory of one group, by `baseline`:

    `std` (r − mean) / (std + epsilon), std with ddof 1 (GRPO, arXiv:2402.03300, §4.1.2); `no_std` r − mean
    (Dr. GRPO, arXiv:2503.20783); `leave_one_out` r − the mean of the others (RLOO, arXiv:2402.14740).
    Raises ValueError for fewer than two rewards (no baseline), a reward that is not finite, or rewards so
    large that their spread is not."""
    if len(rewards) < 2:
        raise ValueError(f"a group of {len(rewards)} has no baseline; group-relative advantages need 2 or more")
    bad = next((reward for reward in rewards if not math.isfinite(reward)), None)
    if bad is not None:
        raise ValueError(f"reward {bad} is not finite")
    if is_degenerate(rewards):
        return [0.0] * len(rewards)
    try:
        advantages = _advantages(rewards, baseline, epsilon)
    except OverflowError:
        advantages = [math.inf]
    if not all(map(math.isfinite, advantages)):
        raise ValueError(f"rewards up to {max(map(abs, rewards))} are too large to compare")
    return advantages


def _advantages(rewards: Sequence[float], baseline: Baseline, epsilon: float) -> list[float]:
    count = len(rewards)
    total = math.fsum(rewards)
    if baseline == "leave_one_out":
        return [reward - (total - reward) / (count - 1) for reward in rewards]
    centred = [reward - total / count for reward in rewards]
    if baseline == "no_std":
        return centred
    std = math.sqrt(math.fsum(difference**2 for difference in centred) / (count - 1))
    return [difference / (std + epsilon) for difference in centred]


def is_degenerate(rewards: Sequence[float]) -> bool:
    """All rewards are equal, so every advantage is 0. Compared exactly: a rounded variance would not be 0."""
    return min(rewards) == max(rewards)
