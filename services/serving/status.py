"""What this replica tells about itself: the bus announcement, and the residency report by tier."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from typing import Any

from services.serving.fetch import AdapterFiles
from services.serving.residency import Residency
from services.serving.sampling import Sampler
from services.serving.supervise import Supervisor
from shared.bases import Base
from shared.engine.port import Capabilities, EngineDead, ResidentAdapter
from shared.residency import FailedRevision, ReadyRevision, Replica
from shared.telemetry.metrics import LOADS_IN_FLIGHT, LOADS_WAITING, RESIDENT, RESIDENT_BYTES

logger = logging.getLogger(__name__)

ANNOUNCED_FAILURES = 50
"""Newest first: an announcement is one key-value message and stays small."""


REPORTED_ON_DISK = 1000
"""Most recently used, last."""


@dataclass(frozen=True)
class Identity:
    """`name` is stable over restarts of the process, `url` is where callers reach it."""

    name: str
    url: str
    base: Base


class Status:
    def __init__(
        self, identity: Identity, supervisor: Supervisor, residency: Residency, sampler: Sampler, files: AdapterFiles
    ) -> None:
        self._identity, self._supervisor, self._residency = identity, supervisor, residency
        self._sampler, self._files = sampler, files
        self._has: Capabilities | None = None

    def replica(self) -> Replica | None:
        """The announcement of now; None before the first engine is up. While an engine is being
        restarted the replica stays announced, with nothing ready."""
        engine = self._supervisor.running()
        if engine is not None:
            self._has = engine.capabilities()
        if self._has is None:
            return None
        failed = list(self._residency.failures.given_up().items())[-ANNOUNCED_FAILURES:]
        return Replica(
            replica=self._identity.name,
            boot_id=self._supervisor.boot_id,
            url=self._identity.url,
            base=self._identity.base.name,
            token=self._identity.base.token,
            engine=self._has.name,
            dtype=self._has.dtype,
            max_rank=self._has.max_rank,
            slots=self._has.slots,
            max_resident=self._has.max_resident,
            max_context=self._has.max_context,
            ready=tuple(
                ReadyRevision(revision=entry.revision, adapter_sha256=entry.loaded.proof.adapter_sha256)
                for entry in self._residency.residents()
            ),
            prewarming=tuple(self._residency.prewarming()),
            failed=tuple(FailedRevision(revision=revision, reason=reason[:300]) for revision, reason in failed),
            in_flight=self._sampler.in_flight,
            waiting=self._sampler.waiting,
            loads=len(self._residency.queue.waiting()),
            structured_output=self._has.structured_output,
            tools=self._has.tools,
            at=time.time(),
        )

    async def report(self) -> dict[str, Any]:
        """Every tier as it is: slots and memory by the engine's own list, disk by the directory."""
        resident = await self._resident()
        return {
            "replica": self._identity.name,
            "boot_id": self._supervisor.boot_id,
            "base": self._identity.base.name,
            "engine": "up" if self._supervisor.running() else self._supervisor.reason,
            "restarts": self._supervisor.restarts,
            "in_flight": self._sampler.in_flight,
            "waiting": self._sampler.waiting,
            "slot": [adapter.revision for adapter in resident if adapter.in_slot],
            "memory": [
                {
                    "revision": adapter.revision,
                    "adapter_sha256": adapter.adapter_sha256,
                    "pinned": adapter.pinned,
                    "in_flight": adapter.in_flight,
                    "bytes": adapter.bytes,
                }
                for adapter in resident
            ],
            "disk": self._files.on_disk()[-REPORTED_ON_DISK:],
            "disk_count": self._files.size()[0],
            "wanted": self._residency.wanted(),
            "loads": [asdict(view) for view in self._residency.queue.views()],
            "failed": self._residency.failures.given_up(),
        }

    async def measure(self) -> None:
        """Set the gauges from the engine's own list, so that an idle resident counts like a busy one."""
        base = self._identity.base.name
        resident = await self._resident()
        on_disk, disk_bytes = self._files.size()
        RESIDENT.labels(base, "slot").set(sum(adapter.in_slot for adapter in resident))
        RESIDENT.labels(base, "memory").set(len(resident))
        RESIDENT.labels(base, "disk").set(on_disk)
        RESIDENT_BYTES.labels(base, "memory").set(sum(adapter.bytes for adapter in resident))
        RESIDENT_BYTES.labels(base, "disk").set(disk_bytes)
        stages = self._residency.queue.stages()
        LOADS_WAITING.labels(base).set(stages["queued"] + stages["fetched"])
        for stage in ("fetching", "activating"):
            LOADS_IN_FLIGHT.labels(base, stage).set(stages[stage])

    async def _resident(self) -> list[ResidentAdapter]:
        """The engine's own list, which the working set is made to agree with."""
        engine = self._supervisor.running()
        if engine is None:
            return []
        before = self._residency.residents()
        try:
            listed = await engine.resident()
            self._residency.reconcile(before, listed)
            return listed
        except EngineDead:
            self._supervisor.dead(engine)
        except Exception as error:
            logger.warning("the engine does not say what is resident: %r", error)
        return []
