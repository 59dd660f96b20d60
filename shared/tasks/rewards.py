"""From the tagged union of a request to a reward and its name.

Input that others wrote (patterns, and the expressions in completions) is worked on within bounds of time
and memory (`host.py`).
"""

from __future__ import annotations

import hashlib

from mint_schemas.training import ExactMatch, MathVerify, PluginReward, Regex, Reward, WebhookReward

from shared.tasks.hosted import HostError
from shared.tasks.maths import MathReward, math_scorer
from shared.tasks.patterns import Pattern
from shared.tasks.plugin import Plugin, plugin_scorer
from shared.tasks.reward import NO_HOSTS, BatchReward, OneByOne, RewardError, RewardSettings
from shared.tasks.webhook import Webhook, webhook_scorer

__all__ = ["RewardError", "reward_function", "scorer_name"]


def scorer_name(reward: Reward) -> str:
    """Stable, and different for rewards that score differently. Raises ValueError for a plugin that is
    not installed, and for math_verify where its library is not."""
    match reward:
        case ExactMatch():
            return "exact_match"
        case Regex():
            return f"regex:{hashlib.sha256(reward.pattern.encode()).hexdigest()[:16]}"
        case MathVerify():
            return math_scorer()
        case PluginReward():
            return plugin_scorer(reward)
        case WebhookReward():
            return webhook_scorer(reward)


def reward_function(reward: Reward, settings: RewardSettings = NO_HOSTS) -> OneByOne | BatchReward:
    """Raises ValueError for a reward that cannot be had here: a pattern that does not compile, a plugin
    that is not installed, a host that is not allowed."""
    match reward:
        case ExactMatch():
            return _exact_match
        case Regex():
            return _regex(reward.pattern)
        case MathVerify():
            return MathReward(settings.concurrency)
        case PluginReward():
            return Plugin(reward)
        case WebhookReward():
            return Webhook(reward, settings.hosts, settings.concurrency)


def _exact_match(completion: str, answer: str) -> float:
    return float(completion.strip() == answer.strip())


def _regex(pattern: str) -> OneByOne:
    try:
        bounded = Pattern(pattern)
    except HostError as error:
        raise ValueError(f"the reward's pattern {pattern!r:.200} does not compile: {error}") from error

    def score(completion: str, answer: str) -> float:
        matched, group = bounded.search(completion)
        if not matched:
            return 0.0
        return float(group == answer) if bounded.groups else 1.0

    return score
