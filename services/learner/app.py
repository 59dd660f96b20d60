"""Wiring: settings and resources → a learner for the service shell, alone or as the leader of a group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
import transformers
from fastapi import APIRouter
from mint_schemas.commands import UpdateRequested

from services.learner.base_model import ResidentBase
from services.learner.config import LearnerSettings
from services.learner.group_bench import GroupBench
from services.learner.leader import LeadBench, Leader
from services.learner.operations import Operations
from services.learner.ranks import Open, Ranks
from services.learner.slots import SlotTable
from services.learner.step import UpdateJob
from services.learner.trainer import TorchTrainer
from services.learner.workbench import Schedule, Workbench
from shared.bases import Base
from shared.bus import command_durable
from shared.catalog.operations_client import OperationsClient
from shared.errors import Fatal
from shared.service import Resources
from shared.text.codec import TextCodec
from shared.worker import Faults, serve_commands

# less than what the shell gives a service to stop: a turn ends at its next micro-batch
_LEAVE_S = 15.0


class LearnerApp:
    """Holds the base models resident and works on their `update.requested` and `operations.requested`, one turn
    at a time per base."""

    routers: Sequence[APIRouter] = ()

    def __init__(
        self,
        resources: Resources,
        settings: LearnerSettings,
        bases: Iterable[Base],
        catalog: OperationsClient,
        leader: Leader | None = None,
    ) -> None:
        self._resources, self._settings, self._bases = resources, settings, tuple(bases)
        self._catalog, self._leader = catalog, leader

    async def start(self) -> None:
        benches = {base.name: await asyncio.to_thread(self._open, base) for base in self._bases}
        job = UpdateJob(benches, self._resources.store)
        await serve_commands(
            self._resources,
            "mint.v1.update.requested",
            UpdateRequested,
            job,
            benches,
            self._settings.learner_commands_in_flight,
        )
        await self._serve_operations(benches)

    async def _serve_operations(self, benches: Mapping[str, Workbench]) -> None:
        resources, settings = self._resources, self._settings
        faults = Faults(resources.name, settings.fault, settings.fault_dir)
        operations = Operations(
            self._catalog, resources.store, benches, settings.worker_id, settings.heartbeat_s, faults
        )
        for name in benches:
            durable = command_durable("mint.v1.operations.requested", resources.bases[name].token)
            await resources.bus.consume(durable, operations.handle, settings.learner_policies_in_flight)

    async def stop(self) -> None:
        if self._leader is not None:
            await asyncio.to_thread(self._leader.close, _LEAVE_S)

    def healthy(self) -> str | None:
        return None

    def _open(self, base: Base) -> Workbench:
        return (
            make_bench(base, self._settings) if self._leader is None else lead_bench(base, self._settings, self._leader)
        )


@asynccontextmanager
async def build(resources: Resources, ranks: Ranks | None = None) -> AsyncIterator[LearnerApp]:
    """`ranks`: the group that this process leads."""
    settings = resources.settings
    if not isinstance(settings, LearnerSettings):
        raise Fatal(f"the learner needs LearnerSettings, not {type(settings).__name__}")
    leader = None if ranks is None else Leader(ranks)
    catalog = OperationsClient(settings.catalog_url)
    try:
        yield LearnerApp(resources, settings, bases_of(settings, resources.bases), catalog, leader)
    finally:
        await catalog.close()


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
    return Workbench(*_parts(base, settings, None))


def lead_bench(base: Base, settings: LearnerSettings, leader: Leader) -> Workbench:
    """The same over all processes of the leader's group, each of which loads its share."""
    bench: Workbench = leader.lead(
        Open(base, settings), lambda: LeadBench(*_parts(base, settings, leader.ranks), leader=leader)
    )
    return bench


def follow_bench(order: Open, ranks: Ranks) -> GroupBench:
    """A follower's share of a base that the leader opens."""
    return GroupBench(*_parts(order.base, order.settings, ranks), peers=ranks.peers)


def _parts(base: Base, settings: LearnerSettings, ranks: Ranks | None) -> tuple[Any, ...]:
    """The arguments of a workbench."""
    if settings.learner_threads:
        torch.set_num_threads(settings.learner_threads)
    transformers.utils.logging.disable_progress_bar()
    resident = ResidentBase(
        base.directory,
        settings.learner_precision,
        base.target_modules,
        ranks.device if ranks else settings.learner_device,
        settings.learner_packing,
        ranks.mesh if ranks else None,
    )
    slots = SlotTable(resident, settings.learner_slots, base.max_rank)
    trainer = TorchTrainer(resident, settings.learner_batch_tokens, ranks.peers if ranks else None)
    schedule = Schedule(settings.learner_schedule, settings.learner_batch_tokens)
    return base, resident, slots, trainer, TextCodec.load(base.directory), schedule
