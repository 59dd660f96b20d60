"""The rollout service on a real bus: a command in, a record in the store and its event out."""

from __future__ import annotations

import base64
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from mint_schemas import RolloutCompleted
from mint_schemas.commands import RolloutRequested
from mint_schemas.training import ArithmeticTask, Regex

from services.rollout.app import build
from services.rollout.config import RolloutSettings
from services.rollout.groups import GroupSampler
from shared.bases import Base
from shared.bus import CATALOG_DEAD, CATALOG_EVENTS, Bus, Received
from shared.rl.record import Group, RolloutRecord, Trajectory
from shared.sampling.fake import FakeSampler
from shared.store.memory import MemoryStore
from shared.tasks import load_task
from tests.sampling import ADAPTER_SHA256, BASE_SHA256, REVISION, answering, load_codec, small_base
from tests.sampling_stack import Commands, replica, resources, until
from tests.tiny import tokenizer_directory

TYPE = "mint.v1.rollout.requested"
SUMS = ArithmeticTask(kind="arithmetic", max_operand=20)
COMMAND = RolloutRequested(
    command_id="run-1:rollout:1",
    run_id="run-1",
    policy="acme/adder",
    base="tiny/llama",
    step=1,
    revision=REVISION,
    adapter_sha256=ADAPTER_SHA256,
    task=SUMS,
    prompts=6,
    group_size=4,
    max_tokens=8,
    temperature=1.0,
    seed=0,
)


class Stage:
    """The service, its surroundings, and what comes out of it."""

    def __init__(self, bus: Bus, base: Base, sampler: FakeSampler) -> None:
        self.bus, self.base, self.sampler = bus, base, sampler
        self.store, self.catalog = MemoryStore(), Commands("mint.v1.rollout.completed", base.token)
        self.events: list[Received] = []
        self.dead: list[Received] = []

    async def listen(self) -> None:
        async def event(received: Received) -> None:
            self.events.append(received)

        async def dead(received: Received) -> None:
            self.dead.append(received)

        await self.bus.consume(CATALOG_EVENTS, event)
        await self.bus.consume(CATALOG_DEAD, dead)

    async def send(self, command: RolloutRequested, replay_n: int | None = None) -> None:
        await self.bus.publish(TYPE, command.command_id, "mint/catalog", self.base.token, command, replay=replay_n)


@pytest.fixture
async def stage(bus: Bus) -> AsyncIterator[Stage]:
    base = replace(small_base(), directory=tokenizer_directory())
    codec = load_codec()
    sampler = answering(codec, lambda a, b, index: str(a + b) if index == 0 else "no")
    stage = Stage(bus, base, sampler)
    await stage.listen()
    settings = RolloutSettings(rollout_patience_s=20, data_dir=Path("/nowhere"))
    async with (
        replica(bus, base, sampler),
        build(resources("rollout", settings, bus, stage.store, stage.catalog, base)) as app,
    ):
        await app.start()
        assert app.healthy() is None
        yield stage
        await bus.drain()
        await app.stop()


async def test_a_command_becomes_a_record_and_an_event(stage: Stage) -> None:
    """nats-server#7564: the event names the record; its tokens stay in the store."""
    await stage.send(COMMAND)
    await until(lambda: stage.events, "rollout.completed")
    event = stage.events[0].decode(RolloutCompleted)
    record = RolloutRecord.from_bytes(await stage.store.get(event.record))
    assert stage.events[0].envelope.source == "mint/rollout"
    assert (record.revision, record.adapter_sha256, record.base_sha256) == (REVISION, ADAPTER_SHA256, BASE_SHA256)
    assert (event.groups, event.trajectories, event.reward_mean) == (6, 24, 0.25)
    assert len(record.groups) == 6


async def test_a_command_that_comes_again_is_answered_not_sampled_again(stage: Stage) -> None:
    await stage.send(COMMAND)
    await until(lambda: stage.events, "the first answer")
    sampled = len(stage.sampler.requests)
    await stage.send(COMMAND, replay_n=1)
    await until(lambda: stage.catalog.takes == 2, "the second take")
    assert len(stage.sampler.requests) == sampled
    assert len(stage.catalog.results) == 1


async def test_a_reward_that_fails_is_dead_lettered_with_the_prompt(stage: Stage) -> None:
    runaway = SUMS.model_copy(update={"reward": Regex(kind="regex", pattern="^(a|aa)+$")})
    codec = load_codec()
    stage.sampler.reply = lambda request, index: (*codec.encode("a" * 100 + "!"), 2)
    await stage.send(COMMAND.model_copy(update={"task": runaway, "max_tokens": 300, "prompts": 1, "group_size": 2}))
    await until(lambda: stage.dead, "a dead letter")
    assert "failed on prompt" in stage.dead[0].dead_reason
    assert "more than 1 s of CPU time" in stage.dead[0].dead_reason
    assert not stage.catalog.results


async def test_another_adapter_than_the_commanded_one_is_dead_lettered(stage: Stage) -> None:
    """verl#7495: the adapter that serving holds is not the one that was exported."""
    await stage.send(COMMAND.model_copy(update={"adapter_sha256": "9" * 64}))
    await until(lambda: stage.dead, "a dead letter")
    assert f"adapter sha256 {ADAPTER_SHA256} instead of {'9' * 64}" in stage.dead[0].dead_reason
    assert not stage.catalog.results


async def test_three_megabytes_of_rollout_are_a_reference_on_the_bus(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """argo-events#2163: a bus takes 1 MB a message; what was sampled goes by key, digest and size."""
    noise = random.Random(0)

    def trajectory() -> Trajectory:
        text = base64.b64encode(noise.randbytes(150_000)).decode()
        return Trajectory(token_ids=(5, 2), logprobs=(-1.0, -1.0), reward=0.0, finish_reason="stop", text=text)

    group = Group(prompt_id="p", prompt_ids=(1,), answer="", trajectories=tuple(trajectory() for _ in range(24)))
    small = await GroupSampler(stage.sampler, stage.base, load_codec()).record(
        COMMAND, await load_task(SUMS, stage.store.get), lambda: None
    )
    big = small.model_copy(update={"groups": (group,)})

    async def record(*_: object) -> RolloutRecord:
        return big

    monkeypatch.setattr(GroupSampler, "record", record)
    await stage.send(COMMAND)
    await until(lambda: stage.events, "rollout.completed")
    event = stage.events[0].decode(RolloutCompleted)
    assert event.record.size > 3_000_000
    assert len(stage.events[0].body) < 4096
    assert RolloutRecord.from_bytes(await stage.store.get(event.record)) == big
