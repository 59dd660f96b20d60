"""The one table of the bus: every stream, subject, durable and bucket, and nothing declares another.

In: the contracts of `mint_schemas` and the tokens of the configured base models. Out: what the
provisioner creates, what services compare with at boot, and the table in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mint_schemas import CONTRACTS

from shared.residency import REPLICA_TTL_S, REPLICAS_BUCKET, RESIDENCY_BUCKET

__all__ = ["COMMANDS", "DEAD", "EVENTS", "BucketSpec", "Durable", "Stream", "Table", "dead_subject", "table_for"]

COMMANDS, EVENTS, DEAD = "COMMANDS", "EVENTS", "DEAD"

TRAIN_REQUESTED = "mint.v1.train.requested"
CATALOG_TRAIN, CATALOG_EVENTS, CATALOG_DEAD = "catalog-train-requested", "catalog-events", "catalog-dead"

_DAY = 86_400.0
_ACK_WAIT_S = 30.0
_MAX_DELIVER = 100
_MAX_ACK_PENDING = 64

_WORKERS = {
    "mint.v1.rollout.requested": "rollout",
    "mint.v1.update.requested": "learner",
    "mint.v1.export.requested": "exporter",
    "mint.v1.evaluation.requested": "evaluator",
    "mint.v1.operations.requested": "learner",
    "mint.v1.sample.requested": "rollout",
}


@dataclass(frozen=True)
class Stream:
    name: str
    subjects: tuple[str, ...]
    retention: Literal["workqueue", "limits"]
    discard: Literal["new", "old"]
    max_age_s: float
    max_msgs: int = -1
    duplicate_window_s: float = 120.0


@dataclass(frozen=True)
class Durable:
    """A pull consumer. `ack_wait_s` alone paces redelivery after a crash (a `backoff` would replace it);
    `max_deliver` is a net far above every retry count of our own."""

    name: str
    stream: str
    filters: tuple[str, ...]
    ack_wait_s: float = _ACK_WAIT_S
    max_deliver: int = _MAX_DELIVER
    max_ack_pending: int = _MAX_ACK_PENDING


@dataclass(frozen=True)
class BucketSpec:
    name: str
    ttl_s: float


@dataclass(frozen=True)
class Table:
    streams: tuple[Stream, ...]
    durables: tuple[Durable, ...]
    buckets: tuple[BucketSpec, ...]

    def durable(self, name: str) -> Durable:
        """Raises ValueError naming those that exist."""
        for durable in self.durables:
            if durable.name == name:
                return durable
        raise ValueError(f"no durable {name!r} in the bus table; there are {', '.join(d.name for d in self.durables)}")


def command_durable(type_: str, token: str) -> str:
    """The durable of a worker's command for one base. Raises ValueError for what is no such command."""
    if type_ not in _WORKERS:
        raise ValueError(f"{type_!r} is no worker's command; those are {', '.join(_WORKERS)}")
    return f"{_WORKERS[type_]}-{type_.removeprefix('mint.v1.').replace('.', '-')}-{token}"


def dead_subject(subject: str) -> str:
    """Where a message of `subject` is dead-lettered; a foreign subject keeps its last token only."""
    token = subject.rsplit(".", 1)[-1]
    for contract in CONTRACTS:
        if subject == contract.subject(token):
            return f"mint.v1.dead.{contract.type.removeprefix('mint.v1.')}.{token}"
    return f"mint.v1.dead.unknown.unknown.{token}"


def table_for(tokens: Iterable[str], ack_wait_s: float = _ACK_WAIT_S, max_deliver: int = _MAX_DELIVER) -> Table:
    """The whole bus for these base tokens. Other waits and counts than the default are for tests."""
    tokens = tuple(tokens)
    commands = tuple(f"{c.type}.*" for c in CONTRACTS if c.stream == COMMANDS)
    events = tuple(f"{c.type}.*" for c in CONTRACTS if c.stream == EVENTS)
    dead = tuple(dead_subject(f"{c.type}.*") for c in CONTRACTS) + ("mint.v1.dead.unknown.unknown.*",)
    streams = (
        Stream(COMMANDS, commands, "workqueue", "new", max_age_s=0, max_msgs=100_000),
        Stream(EVENTS, events, "limits", "old", max_age_s=30 * _DAY),
        Stream(DEAD, dead, "limits", "old", max_age_s=90 * _DAY),
    )

    def durable(name: str, stream: str, *filters: str) -> Durable:
        return Durable(name, stream, filters, ack_wait_s, max_deliver)

    durables = [
        durable(CATALOG_TRAIN, COMMANDS, f"{TRAIN_REQUESTED}.*"),
        *(durable(command_durable(type_, t), COMMANDS, f"{type_}.{t}") for type_ in _WORKERS for t in tokens),
        durable(CATALOG_EVENTS, EVENTS, *events),
        durable(CATALOG_DEAD, DEAD, *dead),
    ]
    buckets = (BucketSpec(RESIDENCY_BUCKET, 0), BucketSpec(REPLICAS_BUCKET, REPLICA_TTL_S))
    return Table(streams, tuple(durables), buckets)
