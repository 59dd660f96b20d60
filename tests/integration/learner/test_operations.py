"""Operations through the real catalog and bus: a learner that dies, an export, and a sample of what was learnt."""

from __future__ import annotations

import asyncio

import numpy as np

from services.rollout.sample_handler import SampleHandler
from services.rollout.samples import OperationSampler
from shared.bus import command_durable
from shared.catalog import operations as ops
from shared.catalog.operations_client import OperationsClient
from shared.operations import content
from shared.operations.payload import SamplePayload, SampleResult, SavePayload, digest, encode
from shared.sampling.fake import FakeSampler
from shared.text import TextCodec
from tests.catalog_world import World
from tests.integration.learner.learning_world import Dying, new_client, start_exporter, start_learner
from tests.tiny import TINY_NAME, TINY_TOKEN


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
    await start_exporter(world)

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
