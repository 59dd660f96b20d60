"""A worker between a real bus, a real HTTP catalog client and a store: one event per command, whatever
happens in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from mint_schemas import EvaluationRequested

from shared.bus import Bus, Table, table_for
from shared.catalog.api import EvaluationResult
from shared.catalog.client import CatalogClient
from shared.errors import Fatal, Retryable
from shared.service import Resources
from shared.settings import CommonSettings
from shared.store.memory import MemoryStore
from shared.store.port import StoreUnavailable
from shared.telemetry import current_traceparent, span
from shared.telemetry.metrics import REGISTRY
from shared.worker import AttemptFiles, Job, LeaseView, serve_commands
from tests.integration.bus.helpers import TYPE, command, empty, eventually, jetstream, send, waiting
from tests.integration.worker.catalog_double import CatalogDouble
from tests.integration.worker.worker_process import score

ACK_WAIT_S = 0.6
ID = "r1:evaluation:base"


@pytest.fixture
def bus_table() -> Table:
    return table_for(["tiny-llama"], ack_wait_s=ACK_WAIT_S)


@pytest.fixture
def catalog() -> CatalogDouble:
    return CatalogDouble()


class TinyBase:
    token = "tiny-llama"


Start = Callable[..., Awaitable[Bus]]


@pytest.fixture
async def start(make_bus: Callable[[], Bus], catalog: CatalogDouble) -> AsyncIterator[Start]:
    """Starts a worker named `name` with `job`; returns its bus."""
    store = MemoryStore()
    clients: list[CatalogClient] = []

    async def begin(job: Job[Any] = score, name: str = "w1", heartbeat_s: float = 0.1) -> Bus:
        bus = make_bus()
        await bus.connect()
        client = CatalogClient("http://catalog", transport=httpx.ASGITransport(app=catalog.app()))
        clients.append(client)
        settings = CommonSettings(worker_id=name, heartbeat_s=heartbeat_s)
        bases: Any = {"tiny/llama": TinyBase()}
        resources = Resources("evaluator", settings, bus, store, client, bases, REGISTRY, "")
        await serve_commands(resources, TYPE, EvaluationRequested, job, ["tiny/llama"])
        return bus

    yield begin
    for client in clients:
        await client.close()


async def evaluated(bus: Bus) -> list[dict[str, Any]]:
    count = await waiting(bus, "EVENTS")
    messages = [await jetstream(bus).get_msg("EVENTS", seq=number + 1) for number in range(count)]
    return [{"headers": message.headers, **json.loads(message.data)} for message in messages]


async def test_a_command_becomes_exactly_the_committed_event(start: Start, catalog: CatalogDouble) -> None:
    bus = await start()
    with span("the catalog"):
        trace = current_traceparent() or ""
        await send(bus)
    await eventually(lambda: empty(bus))
    (event,) = await evaluated(bus)
    headers = event.pop("headers")
    won = catalog.commands[ID].event
    assert won is not None
    assert event == won.body
    assert event["details"]["key"].startswith("attempts/r1/evaluation-base/")
    assert (headers["ce-source"], headers["ce-id"], headers["ce-subject"]) == (
        "mint/evaluator",
        "r1:evaluated",
        "acme/adder",
    )
    assert headers["traceparent"].split("-")[1] == trace.split("-")[1]


async def test_a_committed_command_is_published_again_but_not_run_again(start: Start, catalog: CatalogDouble) -> None:
    """SkyRL#2035: the same command delivered again is applied once."""
    runs: list[str] = []

    async def job(command: EvaluationRequested, files: AttemptFiles, lease: LeaseView) -> EvaluationResult:
        runs.append(command.command_id)
        return await score(command, files, lease)

    bus = await start(job)
    await send(bus)
    await eventually(lambda: empty(bus))
    await bus.publish(TYPE, "r1:evaluation", "mint/catalog", "tiny-llama", command(), replay=1)
    await eventually(lambda: empty(bus))
    assert runs == [ID]
    assert catalog.commands[ID].takes == 1
    assert len(await evaluated(bus)) == 1


async def test_a_busy_lease_comes_back_with_its_remaining_time(start: Start, catalog: CatalogDouble) -> None:
    catalog.ttl_s = 1.0
    held = catalog.held(ID)
    held.worker, held.epoch, held.until = "another", 1, asyncio.get_running_loop().time() + 1.0
    bus = await start()
    await send(bus)
    assert 0.9 < await eventually(lambda: empty(bus)) < 2.0
    assert (held.epoch, held.takes) == (2, 1)


async def test_a_closed_command_is_dropped_and_an_exhausted_one_is_dead(start: Start, catalog: CatalogDouble) -> None:
    catalog.ended.add("r1")
    catalog.exhausted.add("r2:evaluation:base")
    bus = await start()
    await send(bus, 1)
    await send(bus, 2)
    await eventually(lambda: empty(bus))
    assert await waiting(bus, "EVENTS") == 0
    letter = await jetstream(bus).get_msg("DEAD", seq=1)
    assert letter.headers["mint-dead-reason"] == "taken 5 times without a commit"
    assert await waiting(bus, "DEAD") == 1


async def test_a_job_that_fails_for_good_is_dead(start: Start, catalog: CatalogDouble) -> None:
    async def job(command: EvaluationRequested, files: AttemptFiles, lease: LeaseView) -> EvaluationResult:
        raise Fatal("the reward of item 7 is NaN")

    bus = await start(job)
    await send(bus)
    await eventually(lambda: empty(bus))
    letter = await jetstream(bus).get_msg("DEAD", seq=1)
    assert letter.headers["mint-dead-reason"] == "the reward of item 7 is NaN"


async def test_an_outage_is_not_the_commands_fault(start: Start, catalog: CatalogDouble) -> None:
    """A store or catalog that is away for long must not use up a command's takes, and so fail its run."""
    tries: list[int] = []

    async def job(command: EvaluationRequested, files: AttemptFiles, lease: LeaseView) -> EvaluationResult:
        tries.append(lease.epoch)
        if len(tries) == 1:
            raise StoreUnavailable("the object store is away")
        return await score(command, files, lease)

    bus = await start(job)
    await send(bus)
    await eventually(lambda: empty(bus))
    assert tries == [1, 2]
    assert [release.failure for release in catalog.releases] == [""]
    assert len(await evaluated(bus)) == 1


async def test_a_job_that_may_work_later_gives_its_lease_back(start: Start, catalog: CatalogDouble) -> None:
    tries: list[int] = []

    async def job(command: EvaluationRequested, files: AttemptFiles, lease: LeaseView) -> EvaluationResult:
        tries.append(lease.epoch)
        if len(tries) == 1:
            raise Retryable("no replica is alive")
        return await score(command, files, lease)

    bus = await start(job)
    await send(bus)
    await eventually(lambda: empty(bus))
    assert tries == [1, 2]
    assert [release.failure for release in catalog.releases] == ["Retryable: no replica is alive"]
    assert len(await evaluated(bus)) == 1


async def test_a_stale_worker_cannot_commit(start: Start, catalog: CatalogDouble) -> None:
    """nats.go#1929: a heartbeat is no fence. The first worker goes on past its lease; the second took
    the command meanwhile; only the second's result becomes the event."""
    catalog.ttl_s = 0.5
    catalog.cut_off.add("slow")
    slow_may, fast_may = asyncio.Event(), asyncio.Event()

    async def slow(command: EvaluationRequested, files: AttemptFiles, lease: LeaseView) -> EvaluationResult:
        await slow_may.wait()
        return (await score(command, files, lease)).model_copy(update={"score": 0.1})

    async def fast(command: EvaluationRequested, files: AttemptFiles, lease: LeaseView) -> EvaluationResult:
        await fast_may.wait()
        return await score(command, files, lease)

    slow_bus = await start(slow, "slow", heartbeat_s=60)
    await send(slow_bus)
    await eventually(lambda: ID in catalog.commands)
    await asyncio.sleep(0.6)
    fast_bus = await start(fast, "fast")
    await fast_bus.publish(TYPE, "r1:evaluation", "mint/catalog", "tiny-llama", command(), replay=1)
    await eventually(lambda: catalog.commands[ID].epoch == 2)
    slow_may.set()
    await eventually(lambda: catalog.refused == ["stale_epoch"])
    fast_may.set()
    await eventually(lambda: empty(fast_bus))
    assert catalog.refused == ["stale_epoch"]
    assert [event["score"] for event in await evaluated(fast_bus)] == [0.5]


async def test_a_cancelled_run_stops_its_job(start: Start, catalog: CatalogDouble) -> None:
    began = asyncio.Event()

    async def job(command: EvaluationRequested, files: AttemptFiles, lease: LeaseView) -> EvaluationResult:
        began.set()
        while True:
            lease.check()
            await asyncio.sleep(0.02)

    bus = await start(job)
    await send(bus)
    await asyncio.wait_for(began.wait(), 5)
    catalog.ended.add("r1")
    assert await eventually(lambda: empty(bus)) < 0.5
    assert (await waiting(bus, "EVENTS"), await waiting(bus, "DEAD")) == (0, 0)


async def test_shutdown_is_no_failure(start: Start, catalog: CatalogDouble) -> None:
    began = asyncio.Event()

    async def job(command: EvaluationRequested, files: AttemptFiles, lease: LeaseView) -> EvaluationResult:
        began.set()
        await asyncio.sleep(60)
        raise AssertionError

    first = await start(job, "first")
    await send(first)
    await asyncio.wait_for(began.wait(), 5)
    second = await start(score, "second")
    await first.drain()
    assert await eventually(lambda: empty(second)) < 1.0
    assert [release.failure for release in catalog.releases] == [""]
