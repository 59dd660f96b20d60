"""Learners, exporters and clients of operations on the real catalog and bus."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from mint_schemas.commands import ExportRequested
from mint_schemas.training import Lora

from services.exporter.export import ExportJob
from services.learner.app import make_bench
from services.learner.config import LearnerSettings
from services.learner.operations import Operations
from shared.adapters.host import host_of
from shared.bus import Bus, command_durable
from shared.catalog import operations as ops
from shared.catalog.operations_client import OperationsClient
from shared.operations import content
from shared.operations.payload import (
    AdamPayload,
    Payload,
    Row,
    SavedResult,
    SavePayload,
    TrainPayload,
    decode,
    digest,
    encode,
)
from shared.worker import serve_commands
from tests.catalog_world import World
from tests.tiny import TINY_NAME, TINY_TOKEN

LORA = Lora(rank=4, alpha=32.0, target_modules=("q_proj", "v_proj"))
ADAM = AdamPayload(learning_rate=1e-2, eps=1e-8)


class Dying:
    """The catalog as a process sees it that is gone before commit number `last`: it says nothing any more."""

    def __init__(self, client: OperationsClient, last: int) -> None:
        self._client, self._left = client, last
        self.dead = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        async def call(request: Any) -> Any:
            if name == "commit":
                self._left -= 1
                if not self._left:
                    self.dead.set()
            if self.dead.is_set():
                await asyncio.Event().wait()
            return await method(request)

        return call


async def start_learner(world: World, client: Any, worker: str, **settings: Any) -> Bus:
    bus = await world.bus()
    bench = make_bench(world.bases[TINY_NAME], LearnerSettings(learner_precision="float32", **settings))
    operations = Operations(client, world.store, {TINY_NAME: bench}, worker, heartbeat_s=0.3)
    await bus.consume(command_durable("mint.v1.operations.requested", TINY_TOKEN), operations.handle, 4)
    return bus


async def start_exporter(world: World) -> None:
    job = ExportJob({TINY_NAME: host_of(world.bases[TINY_NAME])}, world.store)
    about = world.resources("exporter", await world.bus())
    await serve_commands(about, "mint.v1.export.requested", ExportRequested, job, [TINY_NAME])


class Client:
    """Who submits: operations of a model, one number after another."""

    def __init__(self, world: World, catalog: OperationsClient, model_id: str) -> None:
        self._world, self.catalog, self.model_id, self._number = world, catalog, model_id, 0

    async def submit(self, kind: ops.OperationKind, payload: Payload) -> str:
        self._number += 1
        data = encode(payload)
        view = await self.catalog.submit(
            ops.Submit(
                model_id=self.model_id, seq_id=self._number, kind=kind, digest=digest(data),
                payload=await content.keep(self._world.store, data),
            )
        )  # fmt: skip
        return view.request_id

    async def learn(self) -> str:
        """Two steps, saved; the path."""
        for seeds in ((0, 1), (2,)):
            for seed in seeds:
                await self.submit("forward_backward", train(seed))
            await self.submit("optim_step", ADAM)
        return await self.saved("weights", "end")

    async def saved(self, kind: Any, name: str) -> str:
        """The path of what is saved."""
        operation: ops.OperationKind = "save_weights" if kind == "weights" else "save_sampler_weights"
        saved = await self.done(await self.submit(operation, SavePayload(kind, name)))
        assert isinstance(saved, SavedResult)
        return saved.path

    async def done(self, request_id: str) -> Any:
        view = await self.catalog.operation(request_id, wait_s=60.0)
        assert view.result is not None, view
        return decode(await content.read(self._world.store, view.result))


def train(seed: int) -> TrainPayload:
    generator = np.random.default_rng(seed)
    made = []
    for length in (9, 5):
        ids = generator.integers(3, 49152, length + 1, dtype=np.int64)
        made.append(Row(ids[:-1], {"target_tokens": ids[1:], "weights": np.ones(length, np.float32)}))
    return TrainPayload(tuple(made), "cross_entropy")


async def new_client(
    world: World, catalog: OperationsClient, session_id: str, number: int, lora: Lora = LORA
) -> Client:
    made = await catalog.new_model(
        ops.NewModel(session_id=session_id, model_seq_id=number, base=TINY_NAME, lora=lora, seed=7)
    )
    assert made.model_id is not None
    return Client(world, catalog, made.model_id)
