"""The tiers on paper: which one each request of a sequence finds its revision in.

In: requests by number of the revision, sizes of the tiers, the eviction policy that the replica uses. Out:
counts by tier. One request at a time and no failures, so that the counts are exact and repeatable: `slot`
and `disk` keep what was used last, `memory` what the policy keeps, and what is in memory stays on disk.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.serving.eviction import Eviction, EvictionName, make_eviction


@dataclass(frozen=True)
class Sizes:
    slots: int
    memory: int
    disk: int


def zipf(revisions: int, exponent: float, count: int, seed: int) -> list[int]:
    """`count` numbers below `revisions`; the k-th most popular has a share proportional to k^-exponent."""
    shares = np.arange(1, revisions + 1, dtype=np.float64) ** -exponent
    draw = np.random.default_rng(seed)
    return [int(number) for number in draw.choice(revisions, size=count, p=shares / shares.sum())]


def simulate(requests: Sequence[int], sizes: Sizes, policy: EvictionName, skip: int) -> Counter[str]:
    """By tier, of the requests behind the first `skip`."""
    tiers = _Tiers(sizes, make_eviction(policy, sizes.memory))
    found: Counter[str] = Counter()
    for place, number in enumerate(requests):
        found[tiers.ask(str(number))] += place >= skip
    return found


class _Tiers:
    def __init__(self, sizes: Sizes, eviction: Eviction) -> None:
        self._sizes, self._eviction = sizes, eviction
        self._slots, self._memory, self._disk = OrderedDict[str, None](), set[str](), OrderedDict[str, None]()

    def ask(self, revision: str) -> str:
        """The tier that had it; it is in a slot afterwards."""
        held = (("slot", self._slots), ("memory", self._memory), ("disk", self._disk))
        tier = next((name for name, revisions in held if revision in revisions), "catalog")
        if revision not in self._memory:
            self._load(revision)
        # A hold counts as it begins and as it ends.
        self._eviction.used(revision)
        self._eviction.used(revision)
        self._slots[revision] = None
        self._slots.move_to_end(revision)
        if len(self._slots) > self._sizes.slots:
            self._slots.popitem(last=False)
        return tier

    def _load(self, revision: str) -> None:
        if revision not in self._disk and len(self._disk) >= self._sizes.disk:
            del self._disk[next(held for held in self._disk if held not in self._memory)]
        self._disk[revision] = None
        self._disk.move_to_end(revision)
        if len(self._memory) >= self._sizes.memory:
            leaving = min(self._memory, key=self._eviction.worth)
            self._memory.remove(leaving)
            self._slots.pop(leaving, None)
        self._memory.add(revision)
