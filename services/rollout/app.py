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
from shared.errors import Fatal
from shared.sampling.remote import RemoteSampler
from shared.service import Resources
from shared.tasks import RewardSettings, TaskLoader
from shared.text import TextCodec
from shared.worker import serve_commands

__all__ = ["build"]


@dataclass(frozen=True)
class RolloutApp:
    resources: Resources
    settings: RolloutSettings
    sampler: RemoteSampler
    handler: RolloutHandler
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
    ):
        sampler = RemoteSampler(resources.bus, http)
        samplers = {}
        for base in resources.bases.values():
            codec = await asyncio.to_thread(TextCodec.load, base.directory)
            samplers[base.name] = GroupSampler(
                sampler, base, codec, settings.rollout_groups_in_flight, settings.rollout_patience_s
            )
        handler = RolloutHandler(samplers, tasks)
        yield RolloutApp(resources, settings, sampler, handler)
