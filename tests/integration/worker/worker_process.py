"""A worker of its own process, for tests that kill it: `python worker_process.py MODE` with MINT_ settings.

`shell` runs it under the service shell with a job that blocks a thread for a minute; `faults` runs it on
a bus with a short ack wait, with a job that writes one file and ends.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from mint_schemas import EvaluationRequested

from shared.bases import load_bases
from shared.bus import Bus, table_for
from shared.catalog.api import EvaluationResult
from shared.catalog.client import CatalogClient
from shared.service import Resources, run_service
from shared.settings import CommonSettings
from shared.store.s3 import S3Store
from shared.telemetry.metrics import REGISTRY
from shared.worker import AttemptFiles, LeaseView, serve_commands

TYPE = "mint.v1.evaluation.requested"
FAULTS_ACK_WAIT_S = 1.0


async def score(command: EvaluationRequested, files: AttemptFiles, lease: LeaseView) -> EvaluationResult:
    details = await files.put("details.json", b"{}")
    lease.check()
    return EvaluationResult(
        revision=None,
        adapter_sha256=None,
        task_sha256="0" * 64,
        scorer="exact_match",
        sampling={"temperature": 0.0},
        items=command.items,
        score=0.5,
        details=details,
        seconds=0.1,
    )


async def block(command: EvaluationRequested, files: AttemptFiles, lease: LeaseView) -> EvaluationResult:
    (Path(files.attempt_id and sys.argv[2]) / "began").touch()
    await asyncio.to_thread(time.sleep, 60)
    return await score(command, files, lease)


@dataclass
class WorkerApp:
    resources: Resources
    routers: tuple[APIRouter, ...] = ()

    async def start(self) -> None:
        await serve_commands(self.resources, TYPE, EvaluationRequested, block, self.resources.bases)

    async def stop(self) -> None:
        return None

    def healthy(self) -> str | None:
        return None


@asynccontextmanager
async def build(resources: Resources) -> AsyncIterator[WorkerApp]:
    yield WorkerApp(resources)


async def with_faults(settings: CommonSettings) -> None:
    bases = load_bases(settings.bases_file)
    bus = Bus(settings.nats_url, table_for([base.token for base in bases.values()], ack_wait_s=FAULTS_ACK_WAIT_S))
    store = S3Store(settings.s3_url, settings.s3_access_key, settings.s3_secret_key, settings.s3_bucket)
    catalog = CatalogClient(settings.catalog_url)
    await bus.connect()
    resources = Resources("evaluator", settings, bus, store, catalog, bases, REGISTRY, "")
    await serve_commands(resources, TYPE, EvaluationRequested, score, bases)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1] == "shell":
        run_service("evaluator", CommonSettings(), build)
    else:
        asyncio.run(with_faults(CommonSettings()))
