"""The routing rule: the order in which the replicas of one base are asked for one request.

In flow what the replicas announced and what this caller alone knows of them; out flows an order. A pure
function: callers that share no state and see the same announcements agree on where a revision goes.

The load of a replica is the requests that it has (announced, corrected by what this caller started and ended
since) plus its cold loads, queued or under way: each of those will take the engine once, like a request.

A revision goes
1. where it is ready, least loaded first, equals in turn;
2. to a replica that loads it already, since waiting there starts no second load;
3. by rendezvous hashing on the revision (Thaler and Ravishankar 1998: the replica with the highest hash of
   revision and name), so that callers send its first touch to one place. Loads are bounded (Mirrokni, Thorup
   and Zadimoghaddam 2018): whoever would get more than C × mean is passed over for the next in hash order;
4. where it is ready but crowded, then to those passed over.
The base goes to the least loaded. A replica put aside comes last. Invariant: a replica that comes or goes
changes the hash order of the others for no revision.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from shared.residency import Replica

__all__ = ["C", "Mine", "load_of", "order", "score"]

C = 1.25
"""How far above the mean a replica's load may be before it is passed over."""


@dataclass(frozen=True)
class Mine:
    """What this caller alone knows of one replica. `open`: its own requests there; `since`: how many more (or
    fewer) these are than when the replica last announced itself; `asking`: one of them asks for the revision in
    question; `aside`: it was lost, or said that its engine is down, a moment ago."""

    open: int = 0
    since: int = 0
    asking: bool = False
    aside: bool = False


_NOTHING = Mine()


def order(
    replicas: Sequence[Replica],
    revision: str | None,
    mine: Mapping[str, Mine],
    tried: Collection[str] = (),
    turn: int = 0,
) -> list[Replica]:
    """`replicas` of one base as they announced themselves, without those `tried`, first to be asked first.
    `revision` None is the base; `mine` by replica name; `turn` rotates among equals."""
    first = turn % max(len(replicas), 1)
    rotated = [*replicas[first:], *replicas[:first]]
    loads = {replica.replica: load_of(replica, mine.get(replica.replica, _NOTHING)) for replica in rotated}
    counted = [loads[r.replica] for r in rotated if not mine.get(r.replica, _NOTHING).aside] or list(loads.values())
    total, count = sum(counted), len(counted)

    def place(replica: Replica) -> tuple[int, int]:
        own, load = mine.get(replica.replica, _NOTHING), loads[replica.replica]
        if own.aside:
            return 5, load
        if revision is None:
            return 0, load
        if any(ready.revision == revision for ready in replica.ready):
            # Another copy costs a load, and helps only where the others have less to do.
            crowded = replica.waiting >= replica.slots and load > C * total / count
            return (3 if crowded else 0), load
        if own.asking or revision in replica.prewarming:
            return 1, -score(revision, replica.replica)
        # Below its slots nobody waits, and a difference of one request between callers' views moves nothing.
        bound = max(math.ceil(C * (total + 1) / count), replica.slots)
        return (2 if load < bound else 4), -score(revision, replica.replica)

    return sorted((replica for replica in rotated if replica.replica not in tried), key=place)


def load_of(replica: Replica, mine: Mine) -> int:
    """Requests and cold loads. This caller's own requests count even where the announcement lacks them."""
    return max(replica.in_flight + mine.since, mine.open, 0) + replica.loads


def score(revision: str, replica: str) -> int:
    """The weight of a replica for a revision: 64 bits, the same in every process."""
    return int.from_bytes(blake2b(f"{revision}\n{replica}".encode(), digest_size=8).digest(), "big")
