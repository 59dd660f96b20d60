"""Wiring: the evaluator's parts from the shell's resources.

It samples through serving's replicas and holds no model; any number of it may run side by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import httpx
from fastapi import APIRouter
from mint_schemas.commands import EvaluationRequested

from services.evaluator.config import EvaluatorSettings
from services.evaluator.handlers import EvaluationHandler
from services.evaluator.scoring import Scorer
from shared.errors import Fatal
from shared.sampling.remote import RemoteSampler
from shared.service import Resources
from shared.tasks import RewardSettings, TaskLoader
from shared.text import TextCodec
from shared.worker import serve_commands

__all__ = ["build"]


@dataclass(frozen=True)
class EvaluatorApp:
    resources: Resources
    settings: EvaluatorSettings
    sampler: RemoteSampler
    handler: EvaluationHandler
    routers: Sequence[APIRouter] = ()

    async def start(self) -> None:
        await self.sampler.start()
        await serve_commands(
            self.resources,
            "mint.v1.evaluation.requested",
            EvaluationRequested,
            self.handler,
            self.resources.bases,
            self.settings.evaluator_commands_in_flight,
        )

    async def stop(self) -> None:
        await self.sampler.stop()

    def healthy(self) -> str | None:
        return None


@asynccontextmanager
async def build(resources: Resources) -> AsyncIterator[EvaluatorApp]:
    settings = resources.settings
    if not isinstance(settings, EvaluatorSettings):
        raise Fatal(f"evaluator needs EvaluatorSettings, not {type(settings).__name__}")
    # An item holds its connection until it is sampled; how many there are is bounded where they start.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    rewards = RewardSettings.parsed(settings.reward_hosts, settings.evaluator_scoring_concurrency)
    async with (
        httpx.AsyncClient(limits=limits, trust_env=False) as http,
        aclosing(TaskLoader(resources.store.get, rewards)) as tasks,
    ):
        sampler = RemoteSampler(resources.bus, http)
        scorers = {}
        for base in resources.bases.values():
            codec = await asyncio.to_thread(TextCodec.load, base.directory)
            scorers[base.name] = Scorer(
                sampler, base, codec, settings.evaluator_items_in_flight, settings.evaluator_patience_s
            )
        handler = EvaluationHandler(scorers, tasks)
        yield EvaluatorApp(resources, settings, sampler, handler)
