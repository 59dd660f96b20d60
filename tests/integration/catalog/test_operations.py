"""Operations over a real nats-server: what was accepted is done once, whoever is away in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from mint_schemas.commands import OperationsRequested, SampleRequested
from mint_schemas.training import Lora

from shared.bus import Bus, command_durable
from shared.catalog import operations as ops
from shared.catalog.operations_client import OperationsClient
from shared.operations.payload import AdamPayload, Payload, SavePayload, StepResult, digest, encode
from tests.catalog_kit import TINY, eventually
from tests.catalog_world import TOKEN, World, open_world
from tests.operations_kit import content, sample, saved, train, work_through


class Party:
    """Clients and workers of one world, which find the catalog again when it was restarted."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.done: list[int] = []
        self.sampled: list[str] = []
        self.connect()

    def connect(self) -> None:
        api = FastAPI()
        for router in self.world.app.routers:
            api.include_router(router)
        self.client = OperationsClient("http://catalog", transport=httpx.ASGITransport(api))

    async def opened(self) -> str:
        session = await self.client.new_session(ops.NewSession(tenant="acme"))
        request = ops.NewModel(session_id=session.session_id, model_seq_id=0, base=TINY, lora=Lora(rank=8))
        view = await self.client.new_model(request)
        assert view.model_id is not None
        return view.model_id

    async def submit(self, model_id: str, number: int, kind: ops.OperationKind, payload: Payload) -> str:
        data = encode(payload)
        request = ops.Submit(model_id=model_id, seq_id=number, kind=kind, digest=digest(data), payload=content(data))
        return (await self.client.submit(request)).request_id

    async def result(self, request_id: str) -> Any:
        view = await self.client.operation(request_id, wait_s=30)
        assert view.state == "done", view
        return saved(view)

    async def start_learner(self) -> None:
        async def handle(received: Any) -> None:
            asked = received.decode(OperationsRequested)
            await work_through(self.client, self.world.store, asked.policy, "w1", self.done)

        bus = await self.world.bus()
        await bus.consume(command_durable("mint.v1.operations.requested", TOKEN), handle)

    async def start_rollout(self) -> None:
        async def handle(received: Any) -> None:
            asked = received.decode(SampleRequested)
            taken = await self.client.take_sample(ops.TakeSample(request_id=asked.request_id, worker="r1"))
            if taken.status != "granted":
                return
            self.sampled.append(asked.request_id)
            result = content(encode(StepResult({})))
            outcome = ops.CommitOperation(request_id=asked.request_id, worker="r1", epoch=taken.epoch, result=result)
            await self.client.commit(outcome)

        bus = await self.world.bus()
        await bus.consume(command_durable("mint.v1.sample.requested", TOKEN), handle)


async def test_training_saving_and_sampling_by_way_of_the_bus(tmp_path: Path, make_bus: Callable[[], Bus]) -> None:
    async with open_world(tmp_path, make_bus) as world:
        party = Party(world)
        await world.start_workers()
        await party.start_learner()
        await party.start_rollout()
        model_id = await party.opened()
        numbered: list[tuple[int, ops.OperationKind, Payload]] = [
            (2, "optim_step", AdamPayload()),
            (3, "save_sampler_weights", SavePayload("sampler_weights", sampling_session_seq_id=7)),
            (1, "forward_backward", train()),
        ]
        ids = {number: await party.submit(model_id, number, kind, payload) for number, kind, payload in numbered}
        sampler_id = (await party.result(ids[3])).sampling_session_id
        await eventually(lambda: party.done == [1, 2, 3])
        data = encode(sample())
        view = await party.client.submit_sample(
            ops.SubmitSample(sampling_session_id=sampler_id, seq_id=1, digest=digest(data), payload=content(data))
        )
        await party.result(view.request_id)
        assert party.sampled == [view.request_id]
        assert world.jobs == ["export:1"]
        await eventually(lambda: _emptied(world))
        await party.client.close()


async def test_what_was_accepted_before_the_catalog_went_is_done_after_it_came_back(
    tmp_path: Path, make_bus: Callable[[], Bus]
) -> None:
    async with open_world(tmp_path, make_bus) as world:
        party = Party(world)
        model_id = await party.opened()
        ids = [
            await party.submit(model_id, 1, "forward_backward", train()),
            await party.submit(model_id, 2, "optim_step", AdamPayload()),
        ]
        await party.client.close()
        await world.stop_catalog()
        await world.start_catalog()
        party.connect()
        await party.start_learner()
        for request_id in ids:
            await party.result(request_id)
        # A result is there with the commit, the note of it when the commit has been answered.
        await eventually(lambda: party.done == [1, 2])
        assert (await party.client.model(model_id)).step == 1
        await party.client.close()


async def test_a_session_that_nobody_renews_ends_by_itself(tmp_path: Path, make_bus: Callable[[], Bus]) -> None:
    async with open_world(tmp_path, make_bus, session_ttl_s=0.5, drive_every_s=0.1) as world:
        party = Party(world)
        model_id = await party.opened()

        async def unloaded() -> bool:
            return (await party.client.model(model_id)).state == "unloaded"

        await eventually(unloaded)
        (run,) = (await world.client.runs(state="completed")).items
        assert (run.method, run.outcome) == ("tinker", "unloaded")
        await party.client.close()


async def _emptied(world: World) -> bool:
    return await world.messages("COMMANDS") == []
