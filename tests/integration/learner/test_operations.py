"""Operations through the real catalog and bus: a learner that dies, an export, and a sample of what was learnt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from mint_schemas.commands import ExportRequested
from mint_schemas.training import Lora

from services.catalog.config import CatalogSettings
from services.exporter.export import ExportJob
from services.learner.app import make_bench
from services.learner.config import LearnerSettings
from services.learner.operations import Operations
from services.rollout.sample_handler import SampleHandler
from services.rollout.samples import OperationSampler
from shared.adapters.host import host_of
from shared.bases import load_bases
from shared.bus import Bus, Table, command_durable, table_for
from shared.catalog import operations as ops
from shared.catalog.operations_client import OperationsClient
from shared.operations import content
from shared.operations.payload import (
    AdamPayload,
    Payload,
    Row,
    SamplePayload,
    SampleResult,
    SavedResult,
    SavePayload,
    TrainPayload,
    decode,
    digest,
    encode,
)
from shared.sampling.fake import FakeSampler
from shared.text import TextCodec
from shared.worker import serve_commands
from tests.catalog_world import World
from tests.tiny import TINY_NAME, TINY_TOKEN, make_tiny_base, write_bases_file

LORA = Lora(rank=4, alpha=32.0, target_modules=("q_proj", "v_proj"))
ADAM = AdamPayload(learning_rate=1e-2, eps=1e-8)


@pytest.fixture
def bus_table() -> Table:
    return table_for((TINY_TOKEN,), ack_wait_s=2.0)


@pytest.fixture
async def world(tmp_path: Path, make_bus: Callable[[], Bus]) -> AsyncIterator[World]:
    """A catalog whose leases run out soon."""
    torch.set_num_threads(1)
    bases = load_bases(write_bases_file(tmp_path / "bases.json", make_tiny_base(tmp_path / "base")))
    world = World(tmp_path, make_bus, CatalogSettings(lease_ttl_s=2.0))
    world.bases = bases
    await world.start_catalog()
    try:
        yield world
    finally:
        await world.close()


@pytest.fixture
async def client(world: World) -> AsyncIterator[OperationsClient]:
    api = FastAPI()
    for router in world.app.routers:
        api.include_router(router)
    client = OperationsClient("http://catalog", transport=httpx.ASGITransport(api))
    yield client
    await client.close()


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


async def start_learner(world: World, client: Any, worker: str) -> Bus:
    bus = await world.bus()
    bench = make_bench(world.bases[TINY_NAME], LearnerSettings(learner_precision="float32"))
    operations = Operations(client, world.store, {TINY_NAME: bench}, worker, heartbeat_s=0.3)
    await bus.consume(command_durable("mint.v1.operations.requested", TINY_TOKEN), operations.handle, 4)
    return bus


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
        saved = await self.done(await self.submit("save_weights", SavePayload("weights", "end")))
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


async def new_client(world: World, catalog: OperationsClient, session_id: str, number: int) -> Client:
    made = await catalog.new_model(
        ops.NewModel(session_id=session_id, model_seq_id=number, base=TINY_NAME, lora=LORA, seed=7)
    )
    assert made.model_id is not None
    return Client(world, catalog, made.model_id)


async def test_a_learner_that_dies_is_followed_by_one_that_comes_to_the_same_bytes(
    world: World, client: OperationsClient
) -> None:
    """It dies with an optimizer step computed; the next has nothing in memory, and replays what was not applied."""
    session = await client.new_session(ops.NewSession(tenant="acme"))
    first, second = [await new_client(world, client, session.session_id, number) for number in (0, 1)]
    dying = Dying(client, last=3)
    bus = await start_learner(world, dying, "dying")
    learning = asyncio.create_task(first.learn())
    async with asyncio.timeout(60):
        await dying.dead.wait()
    await bus.drain()
    assert (await client.model(first.model_id)).step == 0
    await start_learner(world, client, "next")
    paths = await learning, await second.learn()
    found = [await client.resolve_path(path, "acme") for path in paths]
    sums = [{n: ref.sha256 for n, ref in (view.checkpoint.files if view.checkpoint else {}).items()} for view in found]
    for name in ("adapter.safetensors", "optimizer.safetensors"):
        assert sums[0][name] == sums[1][name]
    assert [(await client.model(each.model_id)).step for each in (first, second)] == [2, 2]


async def test_what_is_learnt_is_exported_as_it_is_and_sampled_from(world: World, client: OperationsClient) -> None:
    """An ephemeral save: its revision is registered, and a sampling session has it."""
    base = world.bases[TINY_NAME]
    await start_learner(world, client, "learner")
    exporting = await world.bus()
    job = ExportJob({TINY_NAME: host_of(base)}, world.store)
    about = world.resources("exporter", exporting)
    await serve_commands(about, "mint.v1.export.requested", ExportRequested, job, [TINY_NAME])

    session = await client.new_session(ops.NewSession(tenant="acme"))
    model = await new_client(world, client, session.session_id, 0)
    await model.learn()
    saved = await model.done(
        await model.submit("save_sampler_weights", SavePayload("sampler_weights", sampling_session_seq_id=5))
    )
    sampler = await client.sampler(saved.sampling_session_id)
    assert sampler.revision is not None
    assert sampler.adapter_sha256 is not None

    replica = FakeSampler(None, {sampler.revision: sampler.adapter_sha256}, base.sha256)
    codec = TextCodec.load(base.directory)
    sampling = OperationSampler(replica, base, codec, asyncio.Semaphore(8))
    handler = SampleHandler(client, world.store, {TINY_NAME: sampling}, "rollout", 0.3)
    bus = await world.bus()
    await bus.consume(command_durable("mint.v1.sample.requested", TINY_TOKEN), handler.handle, 2)
    data = encode(SamplePayload(np.asarray([5, 6, 7], np.int64), num_samples=3, max_tokens=4, seed=1))
    asked = await client.submit_sample(
        ops.SubmitSample(
            sampling_session_id=sampler.sampler_id, seq_id=1, digest=digest(data),
            payload=await content.keep(world.store, data),
        )
    )  # fmt: skip
    result = await model.done(asked.request_id)
    assert isinstance(result, SampleResult)
    assert (result.revision, result.adapter_sha256) == (sampler.revision, sampler.adapter_sha256)
    assert [len(sequence.tokens) for sequence in result.sequences] == [4, 4, 4]
    assert {request.tenant for request in replica.requests} == {"acme"}
