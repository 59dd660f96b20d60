"""Rewards: from (completion, expected answer) to a number.

A pattern comes from whoever asked for the run, so matching it is bounded (`patterns.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from mint_schemas.training import ExactMatch, Regex, Reward

from shared.errors import Fatal
from shared.tasks.patterns import Pattern, PatternError

__all__ = ["RewardError", "reward_function", "scorer_name"]


class RewardError(Fatal):
    """A reward raised or was not finite; the message names the prompt."""


def scorer_name(reward: Reward) -> str:
    """Stable, and different for rewards that score differently."""
    match reward:
        case ExactMatch():
            return "exact_match"
        case Regex():
            return f"regex:{hashlib.sha256(reward.pattern.encode()).hexdigest()[:16]}"


def reward_function(reward: Reward) -> Callable[[str, str], float]:
    """Raises ValueError for a pattern that does not compile."""
    match reward:
        case ExactMatch():
            return _exact_match
        case Regex():
            return _regex(reward.pattern)


def _exact_match(completion: str, answer: str) -> float:
    return float(completion.strip() == answer.strip())


def _regex(pattern: str) -> Callable[[str, str], float]:
    try:
        bounded = Pattern(pattern)
    except (PatternError, BrokenPipeError) as error:
        raise ValueError(f"the reward's pattern {pattern!r:.200} does not compile: {error}") from error

    def score(completion: str, answer: str) -> float:
        matched, group = bounded.search(completion)
        if not matched:
            return 0.0
        return float(group == answer) if bounded.groups else 1.0

    return score
