"""Wiring: settings and resources → an exporter for the service shell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter
from mint_schemas.commands import ExportRequested

from services.exporter.export import ExportJob
from shared.adapters.host import host_of
from shared.service import Resources
from shared.worker import serve_commands


class ExporterApp:
    """Works on the `export.requested` of every configured base."""

    routers: Sequence[APIRouter] = ()

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    async def start(self) -> None:
        bases = self._resources.bases
        hosts = {name: await asyncio.to_thread(host_of, base) for name, base in bases.items()}
        job = ExportJob(hosts, self._resources.store)
        await serve_commands(self._resources, "mint.v1.export.requested", ExportRequested, job, hosts)

    async def stop(self) -> None:
        return None

    def healthy(self) -> str | None:
        return None


@asynccontextmanager
async def build(resources: Resources) -> AsyncIterator[ExporterApp]:
    yield ExporterApp(resources)
