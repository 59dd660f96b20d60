"""Five steps through the service interface are, to the byte, those that the event path's primitives make."""

from __future__ import annotations

import asyncio

import pytest
from mint_schemas.training import Lora

from services.learner.slots import SlotTable
from shared.adapters.layout import TENSOR_FILE
from shared.catalog import operations as ops
from shared.catalog.operations_client import OperationsClient
from shared.operations.payload import LoadPayload, StepResult
from tests.catalog_world import World
from tests.five_steps import CLIP, Made, Step, by_primitives, five_steps
from tests.integration.learner.learning_world import (
    ADAM,
    Client,
    Dying,
    new_client,
    start_exporter,
    start_learner,
    train,
)
from tests.tiny import TINY_NAME

WHOLE = Lora(rank=4, alpha=32.0)
BATCH_TOKENS = 48
"""So few that most passes are cut into several micro-batches."""


@pytest.fixture
def wanted(world: World) -> Made:
    return by_primitives(world.bases[TINY_NAME].directory, five_steps(), WHOLE, BATCH_TOKENS)


@pytest.fixture
async def session_id(client: OperationsClient) -> str:
    return (await client.new_session(ops.NewSession(tenant="acme"))).session_id


async def exported(world: World, model: Client) -> bytes:
    """`adapter_model.safetensors` of the model's state now, as everyone is served with it."""
    path = await model.saved("sampler_weights", "end")
    revision = (await model.catalog.resolve_path(path, "acme")).revision
    assert revision is not None
    files = (await world.client.revision(revision)).manifest.files
    return await world.store.get(files[TENSOR_FILE])


async def submit(model: Client, step: Step) -> str:
    """The optimizer step's request."""
    for asked in step.passes:
        await model.submit("forward_backward", asked)
    return await model.submit("optim_step", step.adam)


async def test_five_steps_give_the_bytes_and_norms_of_the_primitives(
    world: World, client: OperationsClient, wanted: Made, session_id: str
) -> None:
    await start_learner(world, client, "learner", learner_batch_tokens=BATCH_TOKENS)
    await start_exporter(world)
    model = await new_client(world, client, session_id, 0, WHOLE)
    names = [await submit(model, step) for step in five_steps()]
    results = [await model.done(name) for name in names]
    assert all(isinstance(result, StepResult) for result in results)
    assert [result.metrics["grad_norm:mean"] for result in results] == wanted.norms
    assert wanted.norms[1] > CLIP
    assert await exported(world, model) == wanted.adapter


async def test_gradients_that_were_saved_and_loaded_are_those_of_the_same_step(
    world: World, client: OperationsClient, wanted: Made, session_id: str
) -> None:
    """Saved between the two passes of a step; then the model goes astray, and comes back by a load."""
    await start_learner(world, client, "learner", learner_batch_tokens=BATCH_TOKENS)
    await start_exporter(world)
    model = await new_client(world, client, session_id, 0, WHOLE)
    for number, step in enumerate(five_steps()):
        first, *others = step.passes
        await model.submit("forward_backward", first)
        if others:
            path = await model.saved("weights", f"open-{number}")
            await model.submit("forward_backward", train(0))
            await model.submit("optim_step", ADAM)
            await model.submit("load_weights", LoadPayload(path, optimizer=True))
        for asked in others:
            await model.submit("forward_backward", asked)
        await model.submit("optim_step", step.adam)
    assert await exported(world, model) == wanted.adapter


async def test_a_model_evicted_between_its_operations_has_the_same_bytes(
    world: World, client: OperationsClient, wanted: Made, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slot, two models, and a third of another shape that takes it while gradients are open."""
    dropped: list[str] = []
    drop = SlotTable.drop

    def noting(table: SlotTable, policy: str) -> None:
        dropped.append(policy)
        drop(table, policy)

    monkeypatch.setattr(SlotTable, "drop", noting)
    await start_learner(world, client, "learner", learner_batch_tokens=BATCH_TOKENS, learner_slots=1)
    await start_exporter(world)
    models = [await new_client(world, client, session_id, number, WHOLE) for number in (0, 1)]
    other = await new_client(world, client, session_id, 2)
    for step in five_steps():
        for model in models:
            passed = [await model.submit("forward_backward", asked) for asked in step.passes]
            await model.done(passed[-1])
            await other.submit("forward_backward", train(1))
            await other.done(await other.submit("optim_step", ADAM))
            await model.submit("optim_step", step.adam)
    for model in models:
        assert await exported(world, model) == wanted.adapter
    for model in models:
        assert dropped.count((await client.model(model.model_id)).policy) >= len(five_steps())


async def test_a_learner_that_is_gone_with_gradients_open_is_followed_by_one_that_makes_the_same_bytes(
    world: World, client: OperationsClient, wanted: Made, session_id: str
) -> None:
    """It is gone with the second step computed and its two passes committed."""
    dying = Dying(client, last=5)
    bus = await start_learner(world, dying, "dying", learner_batch_tokens=BATCH_TOKENS)
    await start_exporter(world)
    model = await new_client(world, client, session_id, 0, WHOLE)
    for step in five_steps():
        await submit(model, step)
    async with asyncio.timeout(60):
        await dying.dead.wait()
    await bus.drain()
    assert (await client.model(model.model_id)).step == 1
    await start_learner(world, client, "next", learner_batch_tokens=BATCH_TOKENS)
    assert await exported(world, model) == wanted.adapter
