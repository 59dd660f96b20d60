"""What every reward has in common: what it is given, what it answers, how it fails.

A reward is one of two things. One by one: a function (completion, answer) → number, run in a thread. In
batches: an object that scores samples at a time, for verifiers that need more than the answer and for
rewards that live elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.errors import Fatal
from shared.tasks.chat import Messages

__all__ = ["BatchReward", "OneByOne", "NO_HOSTS", "RewardError", "RewardSettings", "Sample", "said"]

OneByOne = Callable[[str, str], float]


class RewardError(Fatal):
    """A reward raised or was not finite; the message names the prompt."""


@dataclass(frozen=True)
class Sample:
    """One completion to score. `id`, `prompt` and `answer` are the item's; `place` is what a generator
    knows the item by."""

    id: str
    prompt: Messages
    completion: str
    answer: str
    place: int = 0


class BatchReward(Protocol):
    """`batch_size`: the most samples of one call; None = all of a batch at once."""

    @property
    def batch_size(self) -> int | None: ...

    async def scores(self, samples: Sequence[Sample]) -> Sequence[float]:
        """One number for each sample, in order."""


@dataclass(frozen=True)
class RewardSettings:
    """What operators decide. `hosts`: what webhooks may call, `host` or `host:port`; `concurrency`: calls
    of rewards at once, in this process; of each webhook beside them."""

    hosts: frozenset[str] = frozenset()
    concurrency: int = 4

    @classmethod
    def parsed(cls, hosts: str, concurrency: int = 4) -> RewardSettings:
        """`hosts` separated by commas, in any letter case."""
        return cls(frozenset(host.strip().lower() for host in hosts.split(",") if host.strip()), concurrency)


NO_HOSTS = RewardSettings()

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def said(completion: str) -> str:
    """What a completion gives as its answer: the inside of its last `<answer>…</answer>`, else all of it."""
    found = _ANSWER.findall(completion)
    return str(found[-1] if found else completion).strip()
