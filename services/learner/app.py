"""Wiring: settings and resources → a learner for the service shell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import torch
import transformers
from fastapi import APIRouter
from mint_schemas.commands import UpdateRequested

from services.learner.base_model import ResidentBase
from services.learner.config import LearnerSettings
from services.learner.slots import SlotTable
from services.learner.step import UpdateJob
from services.learner.trainer import TorchTrainer
from services.learner.workbench import Workbench
from shared.bases import Base
from shared.errors import Fatal
from shared.service import Resources
from shared.text.codec import TextCodec
from shared.worker import serve_commands


class LearnerApp:
    """Holds the base models resident and works on their `update.requested`, one step at a time per base."""

    routers: Sequence[APIRouter] = ()

    def __init__(self, resources: Resources, settings: LearnerSettings, bases: Iterable[Base]) -> None:
        self._resources, self._settings, self._bases = resources, settings, tuple(bases)

    async def start(self) -> None:
        benches = {base.name: await asyncio.to_thread(make_bench, base, self._settings) for base in self._bases}
        job = UpdateJob(benches, self._resources.store)
        await serve_commands(self._resources, "mint.v1.update.requested", UpdateRequested, job, benches)

    async def stop(self) -> None:
        return None

    def healthy(self) -> str | None:
        return None


@asynccontextmanager
async def build(resources: Resources) -> AsyncIterator[LearnerApp]:
    settings = resources.settings
    if not isinstance(settings, LearnerSettings):
        raise Fatal(f"the learner needs LearnerSettings, not {type(settings).__name__}")
    if settings.learner_threads:
        torch.set_num_threads(settings.learner_threads)
    transformers.utils.logging.disable_progress_bar()
    yield LearnerApp(resources, settings, bases_of(settings, resources.bases))


def bases_of(settings: LearnerSettings, bases: dict[str, Base]) -> list[Base]:
    """Raises Fatal naming the configured bases."""
    if not settings.learner_base:
        return list(bases.values())
    if settings.learner_base not in bases:
        raise Fatal(
            f"MINT_LEARNER_BASE is {settings.learner_base!r}; {settings.bases_file} has {', '.join(sorted(bases))}"
        )
    return [bases[settings.learner_base]]


def make_bench(base: Base, settings: LearnerSettings) -> Workbench:
    """Load one base model with its slots. Blocks for seconds."""
    resident = ResidentBase(base.directory, settings.learner_precision, settings.learner_device)
    slots = SlotTable(resident, settings.learner_slots)
    trainer = TorchTrainer(resident, slots, settings.learner_batch_tokens)
    return Workbench(base, resident, slots, trainer, TextCodec.load(base.directory))
