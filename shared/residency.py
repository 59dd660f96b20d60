"""Residency on the bus: what the catalog wants resident, and what each serving replica has.

Two key-value buckets. `residency` holds one `Desired` per base token, written by the catalog alone and
rebuilt from its database; `replicas` holds one `Replica` per `<token>.<replica>`, with a TTL, written
by that replica alone.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

RESIDENCY_BUCKET = "residency"
REPLICAS_BUCKET = "replicas"
REPLICA_TTL_S = 15.0
ANNOUNCE_EVERY_S = 5.0


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class DesiredRevision(_Value):
    """A lower `priority` loads earlier. `pinned`: it never leaves. `keep`: it is loaded again when it is not
    there; what is not kept is loaded while there is room, and leaves like anything else."""

    revision: str
    adapter_sha256: str
    priority: int = 0
    pinned: bool = False
    keep: bool = True


class Desired(_Value):
    """Everything that replicas of one base should hold, most urgent first."""

    base: str
    entries: tuple[DesiredRevision, ...] = ()


class ReadyRevision(_Value):
    revision: str
    adapter_sha256: str


class FailedRevision(_Value):
    """Given up after bounded attempts; `reason` is for people."""

    revision: str
    reason: str


class Replica(_Value):
    """One serving replica now. `url` is its internal HTTP address; `max_context` bounds prompt and
    completion together, in tokens (None: the replica does not say). `in_flight` counts the requests that it
    has, of which `waiting` have no turn in the engine yet; `loads` are the cold loads queued or under way."""

    replica: str
    boot_id: str
    url: str
    base: str
    token: str
    engine: str
    dtype: str
    max_rank: int
    slots: int
    max_resident: int
    max_context: int | None = None
    ready: tuple[ReadyRevision, ...] = ()
    prewarming: tuple[str, ...] = ()
    failed: tuple[FailedRevision, ...] = ()
    in_flight: int = 0
    waiting: int = 0
    loads: int = 0
    structured_output: bool = False
    tools: bool = False
    at: float
