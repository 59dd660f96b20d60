"""GET /mint/v1/status: the base models, the serving replicas alive now, and whether the catalog answers."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.identity import Identity
from shared.errors import MintError
from shared.residency import FailedRevision, ReadyRevision, Replica

__all__ = ["Status", "show_status"]


class BaseStatus(BaseModel):
    name: str
    token: str
    sha256: str
    max_rank: int
    max_context: int
    target_modules: tuple[str, ...]
    bytes: int
    replicas: int


class ReplicaStatus(BaseModel):
    """Revisions of the caller's tenant only."""

    replica: str
    boot_id: str
    base: str
    engine: str
    dtype: str
    max_rank: int
    slots: int
    max_resident: int
    in_flight: int
    at: float
    ready: list[ReadyRevision]
    prewarming: list[str]
    failed: list[FailedRevision]


class Status(BaseModel):
    """`catalog` is `ok`, or what is wrong with it."""

    catalog: str
    bases: list[BaseStatus]
    replicas: list[ReplicaStatus]


async def show_status(gateway: Here, caller: Caller) -> Status:
    """Of replicas: what they hold of the caller's own tenant."""
    alive = gateway.replicas.replicas()
    bases = [
        BaseStatus(
            name=base.name,
            token=base.token,
            sha256=base.sha256,
            max_rank=base.max_rank,
            max_context=base.max_context,
            target_modules=base.target_modules,
            bytes=base.bytes,
            replicas=sum(replica.base == base.name for replica in alive),
        )
        for base in gateway.bases.values()
    ]
    return Status(
        catalog=await _catalog(gateway), bases=bases, replicas=[_replica(replica, caller) for replica in alive]
    )


async def _catalog(gateway: Gateway) -> str:
    try:
        async with asyncio.timeout(gateway.settings.gateway_resolve_timeout_s):
            await gateway.catalog.policies(limit=1)
    except TimeoutError:
        return "does not answer in time"
    except MintError as error:
        return str(error)
    return "ok"


def _replica(replica: Replica, caller: Identity) -> ReplicaStatus:
    shared = replica.model_dump(exclude={"url", "token", "ready", "prewarming", "failed"})
    return ReplicaStatus(
        **shared,
        ready=[ready for ready in replica.ready if caller.owns_policy(ready.revision)],
        prewarming=[revision for revision in replica.prewarming if caller.owns_policy(revision)],
        failed=[failed for failed in replica.failed if caller.owns_policy(failed.revision)],
    )
