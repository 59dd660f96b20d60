"""Rewards that operators install: Python entry points of the group `mint.rewards`.

A plugin is a distribution whose entry point names a factory:

    [project.entry-points."mint.rewards"]
    politeness = "acme_rewards:politeness"

The factory gets the request's `config` (a dict of plain values) and returns a function, plain or `async`,
from a batch of samples to one number each:

    def politeness(config):
        def score(batch):                       # batch: samples with id, prompt, completion, answer
            return [float("please" in sample.completion) for sample in batch]
        return score

A batch is a group of completions of one prompt while training, and all of an evaluation's items. A plain
function runs in a thread. The factory raises ValueError for a config that it cannot use. Install the plugin
where the catalog, rollout and evaluator run. Invariant: a plugin that is missing, broken or mistaken is an
error with its name, never a score.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from mint_schemas.training import PluginReward

from shared.tasks.reward import Sample

__all__ = ["GROUP", "Plugin", "RewardFactory", "plugin_scorer"]

GROUP = "mint.rewards"


class RewardFactory(Protocol):
    """What the entry point names."""

    def __call__(
        self, config: Mapping[str, Any], /
    ) -> Callable[[Sequence[Sample]], Sequence[float] | Awaitable[Sequence[float]]]: ...


class Plugin:
    """A `BatchReward`."""

    batch_size: int | None = None

    def __init__(self, reward: PluginReward) -> None:
        """Raises ValueError for a plugin that is not installed, does not load or refuses its config."""
        try:
            factory: RewardFactory = _entry(reward.name).load()
            self._score = factory(dict(reward.config))
        except Exception as error:
            if isinstance(error, _Missing):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"the reward plugin {reward.name!r} cannot be used: {reason[:500]}") from error
        if not callable(self._score):
            kind = type(self._score).__name__
            raise ValueError(f"the reward plugin {reward.name!r} gave a {kind}; its factory must return a function")

    async def scores(self, samples: Sequence[Sample]) -> Sequence[float]:
        """What the plugin answers; it raises what the plugin raises."""
        if inspect.iscoroutinefunction(self._score):
            return list(await self._score(samples))
        found = await asyncio.to_thread(self._score, samples)
        return list(await found if inspect.isawaitable(found) else found)


def plugin_scorer(reward: PluginReward) -> str:
    """Its name, its distribution's version and its config. Raises ValueError when it is not installed."""
    entry = _entry(reward.name)
    release = f"@{entry.dist.version}" if entry.dist else ""
    text = json.dumps(reward.config, sort_keys=True, separators=(",", ":"))
    config = f":{hashlib.sha256(text.encode()).hexdigest()[:16]}" if reward.config else ""
    return f"plugin:{reward.name}{release}{config}"


class _Missing(ValueError):
    """No entry point has the name, or several have it."""


def _entry(name: str) -> EntryPoint:
    installed = entry_points(group=GROUP)
    found = [entry for entry in installed if entry.name == name]
    if not found:
        names = ", ".join(sorted(installed.names)) or "none"
        raise _Missing(f"no reward plugin {name!r} is installed here (entry points {GROUP}); there are: {names}")
    if len({entry.value for entry in found}) > 1:
        raise _Missing(f"several reward plugins are called {name!r}: {', '.join(entry.value for entry in found)}")
    return found[0]
