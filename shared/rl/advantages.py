"""Group-relative advantages: rewards of one prompt's trajectories in, one number per trajectory out.

Invariant: a group that teaches nothing (all rewards equal) has advantages of exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

STD_EPSILON = 1e-4


def group_advantages(rewards: Sequence[float], epsilon: float = STD_EPSILON) -> list[float]:
    """(r − mean) / (std + epsilon), std with ddof 1: GRPO (arXiv:2402.03300, eq. 4.1.2).

    Raises ValueError for fewer than two rewards (no baseline) or a reward that is not finite."""
    if len(rewards) < 2:
        raise ValueError(f"a group of {len(rewards)} has no baseline; group-relative advantages need 2 or more")
    bad = next((reward for reward in rewards if not math.isfinite(reward)), None)
    if bad is not None:
        raise ValueError(f"reward {bad} is not finite")
    if is_degenerate(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (std + epsilon) for reward in rewards]


def is_degenerate(rewards: Sequence[float]) -> bool:
    """All rewards are equal, so every advantage is 0. Compared exactly: a rounded variance would not be 0."""
    return min(rewards) == max(rewards)
