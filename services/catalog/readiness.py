"""Where revisions are ready, from what the serving replicas announce about themselves.

In: announcements, as they change in the bucket. Out: a `Readiness` of one moment. Invariant: a replica
that has been silent longer than its TTL counts as gone, with everything that it had ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.residency import REPLICA_TTL_S, Replica


@dataclass(frozen=True)
class Readiness:
    """`ready`: revision → replicas; `failed`: revision → why, only where every replica of its base gave
    it up. `max_rank`, `max_context`: base → the smallest maximum among its replicas."""

    ready: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    max_rank: Mapping[str, int] = field(default_factory=dict)
    max_context: Mapping[str, int] = field(default_factory=dict)
    replicas: Mapping[str, int] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        return {revision: len(where) for revision, where in self.ready.items()}


class Replicas:
    """The announcements heard last, by bucket key, with the time when each was heard."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[Replica, float]] = {}

    def heard(self, key: str, replica: Replica, at: float) -> None:
        self._heard[key] = (replica, at)

    def gone(self, key: str) -> None:
        self._heard.pop(key, None)

    def now(self, at: float) -> Readiness:
        alive = [replica for replica, heard in self._heard.values() if at - heard <= REPLICA_TTL_S]
        ready: dict[str, tuple[str, ...]] = {}
        failed: dict[str, str] = {}
        gave_up: dict[tuple[str, str], int] = {}
        max_rank: dict[str, int] = {}
        max_context: dict[str, int] = {}
        count: dict[str, int] = {}
        for replica in sorted(alive, key=lambda r: r.replica):
            count[replica.base] = count.get(replica.base, 0) + 1
            max_rank[replica.base] = min(replica.max_rank, max_rank.get(replica.base, replica.max_rank))
            if replica.max_context is not None:
                max_context[replica.base] = min(replica.max_context, max_context.get(replica.base, replica.max_context))
            for entry in replica.ready:
                ready[entry.revision] = (*ready.get(entry.revision, ()), replica.replica)
            for failure in replica.failed:
                failed.setdefault(failure.revision, f"{failure.reason} (replica {replica.replica})")
                at_base = (replica.base, failure.revision)
                gave_up[at_base] = gave_up.get(at_base, 0) + 1
        hopeless = {revision for (base, revision), replicas in gave_up.items() if replicas == count[base]}
        given_up = {revision: why for revision, why in failed.items() if revision in hopeless - ready.keys()}
        return Readiness(ready, given_up, max_rank, max_context, count)
