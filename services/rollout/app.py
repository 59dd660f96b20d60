"""Wiring: the rollout service's parts from the shell's resources.

It samples through serving's replicas and holds no model; any number of it may run side by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import httpx
from fastapi import APIRouter
from mint_schemas.commands import RolloutRequested

from services.rollout.config import RolloutSettings
from services.rollout.groups import GroupSampler
from services.rollout.handlers import RolloutHandler
from services.rollout.sample_handler import SampleHandler
from services.rollout.samples import OperationSampler
from shared.bus import command_durable
from shared.catalog.operations_client import OperationsClient
from shared.errors import Fatal
from shared.sampling.remote import RemoteSampler
from shared.service import Resources
from shared.tasks import RewardSettings, TaskLoader
from shared.text import TextCodec
from shared.worker import Faults, serve_commands

__all__ = ["build"]


@dataclass(frozen=True)
class RolloutApp:
    resources: Resources
    settings: RolloutSettings
    sampler: RemoteSampler
    handler: RolloutHandler
    samples: SampleHandler
    routers: Sequence[APIRouter] = ()

    async def start(self) -> None:
        await self.sampler.start()
        await serve_commands(
            self.resources,
            "mint.v1.rollout.requested",
            RolloutRequested,
            self.handler,
            self.resources.bases,
            self.settings.rollout_commands_in_flight,
        )
        for base in self.resources.bases.values():
            durable = command_durable("mint.v1.sample.requested", base.token)
            await self.resources.bus.consume(durable, self.samples.handle, self.settings.rollout_samples_in_flight)

    async def stop(self) -> None:
        await self.sampler.stop()

    def healthy(self) -> str | None:
        return None


@asynccontextmanager
async def build(resources: Resources) -> AsyncIterator[RolloutApp]:
    settings = resources.settings
    if not isinstance(settings, RolloutSettings):
        raise Fatal(f"rollout needs RolloutSettings, not {type(settings).__name__}")
    # A group holds its connection until it is sampled; how many there are is bounded where they start.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    rewards = RewardSettings.parsed(settings.reward_hosts, settings.rollout_scoring_concurrency)
    async with (
        httpx.AsyncClient(limits=limits, trust_env=False) as http,
        aclosing(TaskLoader(resources.store.get, rewards)) as tasks,
        _catalog(settings.catalog_url) as catalog,
    ):
        sampler = RemoteSampler(resources.bus, http)
        groups, operations = {}, {}
        places = asyncio.Semaphore(settings.rollout_sequences_in_flight)
        for base in resources.bases.values():
            codec = await asyncio.to_thread(TextCodec.load, base.directory)
            groups[base.name] = GroupSampler(
                sampler, base, codec, settings.rollout_groups_in_flight, settings.rollout_patience_s
            )
            operations[base.name] = OperationSampler(sampler, base, codec, places, settings.rollout_patience_s)
        samples = SampleHandler(
            catalog,
            resources.store,
            operations,
            settings.worker_id,
            settings.heartbeat_s,
            Faults(resources.name, settings.fault, settings.fault_dir),
        )
        yield RolloutApp(resources, settings, sampler, RolloutHandler(groups, tasks), samples)


@asynccontextmanager
async def _catalog(url: str) -> AsyncIterator[OperationsClient]:
    client = OperationsClient(url)
    try:
        yield client
    finally:
        await client.close()
