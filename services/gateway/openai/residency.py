"""GET /v1/residency: which revisions each serving replica has, tier by tier, in the replicas' own words.

Out: everything for a key of all tenants; for a tenant's key what is said of its own policies, and nothing
that could name another's. Invariant: a tenant sees only fields that are listed here, so that what replicas
come to report later is hidden until somebody has thought about it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from services.gateway.edge import Caller, Here
from services.gateway.identity import Identity

__all__ = ["ReplicaResidency", "ResidencyList", "list_residency"]

SHARED = frozenset({"replica", "boot_id", "base", "restarts", "in_flight", "waiting"})
"""What a replica is, which names nobody's policies."""

BY_REVISION = frozenset({"slot", "memory", "wanted", "loads", "failed"})
"""Lists of revisions, or of objects that say their `revision`, or objects whose keys are revisions."""

UP = "up"


class ReplicaResidency(BaseModel):
    """The tiers from near to far are `slot`, `memory`, `disk`; a revision may be in any of them."""

    model_config = ConfigDict(extra="allow")
    replica: str
    error: str | None = Field(None, description="instead of all else: the replica did not report, and why")
    base: str | None = None
    boot_id: str | None = Field(None, description="changes when the engine is started anew")
    engine: str | None = Field(None, description="`up`, or why not (for a tenant's key: `down`)")
    restarts: int | None = None
    in_flight: int | None = Field(None, description="requests that the replica has, of all tenants")
    waiting: int | None = Field(None, description="those of them without a turn in the engine yet")
    slot: list[Any] = Field([], description="revisions in the engine's slots, ready to be batched")
    memory: list[Any] = Field([], description="revisions in the engine's memory: digest, bytes, pins, requests")
    disk: list[Any] | None = Field(None, description="sha256 of the adapters on the local disk; not for tenants")
    wanted: list[Any] = Field([], description="revisions that the catalog wants here, most urgent first")
    loads: list[Any] = Field([], description="cold loads that are queued or under way, in order")
    failed: dict[str, Any] = Field({}, description="revisions that were given up, and why")


class ResidencyList(BaseModel):
    object: Literal["list"]
    data: list[ReplicaResidency]


async def list_residency(
    gateway: Here,
    caller: Caller,
    base: Annotated[str | None, Query(max_length=400, description="only replicas of this base model")] = None,
) -> ResidencyList:
    reports = await gateway.tiers.residency(base)
    seen = reports if caller.tenant is None else [_of_tenant(report, caller) for report in reports]
    return ResidencyList(object="list", data=[ReplicaResidency.model_validate(report) for report in seen])


def _of_tenant(report: dict[str, Any], caller: Identity) -> dict[str, Any]:
    shown = {key: value for key, value in report.items() if key in SHARED}
    if "error" in report:
        return shown | {"error": "it does not answer"}
    shown |= {key: _own(value, caller) for key, value in report.items() if key in BY_REVISION}
    # The reason may name the revision that ended the engine.
    return shown | {"engine": UP if report.get("engine") == UP else "down"}


def _own(value: Any, caller: Identity) -> Any:
    """What of a list or an object by revision is the caller's."""
    if isinstance(value, dict):
        return {revision: said for revision, said in value.items() if caller.owns_policy(revision)}
    if isinstance(value, list):
        return [item for item in value if caller.owns_policy(_revision(item))]
    return None


def _revision(item: Any) -> str | None:
    named = item.get("revision") if isinstance(item, dict) else item
    return named if isinstance(named, str) else None
