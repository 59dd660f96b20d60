"""Two serving processes of one base, and callers that share nothing but the bus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from shared.adapters.manifest import Manifest
from shared.bus import Bus, Table, table_for
from shared.catalog.api import RevisionView
from shared.residency import REPLICA_TTL_S
from shared.sampling import wire
from shared.sampling.collect import collect
from shared.sampling.port import Sampled
from shared.sampling.remote import RemoteSampler
from shared.sampling.routing import score
from shared.store.s3 import S3Store
from tests.sampling_stack import ready_on
from tests.servers import NatsServer, S3Server
from tests.serving_kit import BASE_NAME, BASE_TOKEN, Catalog, Stage, ask, make_base, until
from tests.serving_process import Servers, ServingProcess, catalog_http, start_serving

NAMES = ("mini-0", "mini-1")


@pytest.fixture
def bus_table() -> Table:
    return table_for((BASE_TOKEN,))


class _Catalog(Catalog):
    """`silent` revisions are asked for and not answered the first time, until `released`."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: set[str] = set()
        self.released = asyncio.Event()

    async def revision(self, reference: str) -> RevisionView:
        view = await super().revision(reference)
        if reference in self.silent:
            self.silent.discard(reference)
            await self.released.wait()
        return view


@dataclass
class _Pair:
    stage: Stage
    catalog: _Catalog
    processes: dict[str, ServingProcess]
    samplers: list[RemoteSampler]


@pytest.fixture
async def pair(
    tmp_path: Path, make_bus: Callable[[], Bus], store: S3Store, nats_server: NatsServer, s3_server: S3Server
) -> AsyncIterator[_Pair]:
    """Both replicas up, and seen by two samplers, each with a bus and a directory of its own."""
    base, catalog = make_base(tmp_path / "base"), _Catalog()
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(catalog_http(catalog))
        servers = Servers(nats_server, s3_server, store._bucket, url)
        processes = {}
        for name in NAMES:
            processes[name] = await start_serving(tmp_path, base, servers, name)
            stack.push_async_callback(processes[name].kill)
        for process in processes.values():
            await process.healthy()
        samplers = [await stack.enter_async_context(_sampler(make_bus())) for _ in range(2)]
        for sampler in samplers:
            await until(lambda sampler=sampler: len(sampler.directory.replicas(BASE_NAME)) == 2)  # type: ignore[misc]
        stage = Stage(tmp_path, base, bus=None, store=store, catalog=catalog)  # type: ignore[arg-type]
        yield _Pair(stage, catalog, processes, samplers)


@asynccontextmanager
async def _sampler(bus: Bus) -> AsyncIterator[RemoteSampler]:
    await bus.connect()
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), trust_env=False) as http:
        sampler = RemoteSampler(bus, http)
        await sampler.start()
        yield sampler
        await sampler.stop()


def _home(revision: str) -> str:
    return max(NAMES, key=lambda name: score(revision, name))


def _wrong(answers: list[Sampled], manifest: Manifest) -> int:
    proof = (manifest.revision, manifest.adapter_sha256)
    return sum((answer.served.revision, answer.served.adapter_sha256) != proof for answer in answers)


async def _stream(sampler: RemoteSampler, revision: str) -> Sampled:
    request = ask(revision)
    async with sampler.stream(BASE_NAME, request) as stream:
        return await collect(stream, request)


async def test_first_touches_meet_on_one_replica_and_later_requests_go_where_the_revision_is_ready(
    pair: _Pair,
) -> None:
    plain = [await pair.samplers[0].sample(BASE_NAME, ask()) for _ in range(4)]
    assert {answer.served.replica for answer in plain} == set(NAMES)

    homes = set()
    for number in range(1, 7):
        revision = f"acme/adder@{number}"
        manifest = await pair.stage.add(revision)
        firsts = await asyncio.gather(*(s.sample(BASE_NAME, ask(revision, seed=1)) for s in pair.samplers * 3))
        assert {answer.served.replica for answer in firsts} == {_home(revision)}
        assert len({answer.sequences for answer in firsts}) == 1
        assert _wrong(firsts, manifest) == 0
        reports = await pair.samplers[0].residency(BASE_NAME)
        holders = [report["replica"] for report in reports if manifest.adapter_sha256 in json.dumps(report)]
        assert holders == [_home(revision)], "one fetch in all"
        homes.add(_home(revision))
    assert homes == set(NAMES)

    elsewhere = await pair.stage.add("acme/elsewhere@1")
    other = next(name for name in NAMES if name != _home("acme/elsewhere@1"))
    async with httpx.AsyncClient(trust_env=False) as http:
        body = wire.encode_request(ask("acme/elsewhere@1"))
        assert (await http.post(pair.processes[other].url + wire.SAMPLE_PATH, content=body)).status_code == 200
    for sampler in pair.samplers:
        await until(lambda s=sampler: ready_on(s.directory, BASE_NAME, "acme/elsewhere@1"))  # type: ignore[misc]
        answers = [await sampler.sample(BASE_NAME, ask("acme/elsewhere@1")) for _ in range(5)]
        assert {answer.served.replica for answer in answers} == {other}
        assert _wrong(answers, elsewhere) == 0


async def test_requests_that_wait_on_a_killed_replica_are_all_answered_by_the_other(pair: _Pair) -> None:
    revision = "acme/adder@1"
    manifest = await pair.stage.add(revision)
    home = _home(revision)
    other = next(name for name in NAMES if name != home)
    pair.catalog.silent.add(revision)
    first, second = pair.samplers
    waiting = [asyncio.create_task(_stream(first, revision)) for _ in range(10)]
    waiting += [asyncio.create_task(second.sample(BASE_NAME, ask(revision))) for _ in range(10)]
    # The load does not end, so that nothing has streamed: all twenty wait at one replica, for one load.
    await until(lambda: pair.catalog.asked[revision] == 1)
    await until(lambda: all(_open(sampler, revision) == {home: 10, other: 0} for sampler in pair.samplers))
    assert not any(task.done() for task in waiting)

    await pair.processes[home].kill()
    pair.catalog.released.set()
    answers = await asyncio.gather(*waiting)
    assert {answer.served.replica for answer in answers} == {other}
    assert _wrong(answers, manifest) == 0
    assert len({answer.sequences for answer in answers}) == 1
    assert pair.catalog.asked[revision] == 2, "one load at each of the two"

    for sampler in pair.samplers:
        assert (await sampler.sample(BASE_NAME, ask())).served.replica == other
        await until(lambda s=sampler: _alive(s) == [other], timeout_s=REPLICA_TTL_S)  # type: ignore[misc]
        assert [report["replica"] for report in await sampler.residency()] == [other]


def _open(sampler: RemoteSampler, revision: str) -> dict[str, int]:
    mine = sampler._ledger.mine(sampler.directory.replicas(BASE_NAME), revision)
    return {name: known.open for name, known in mine.items()}


def _alive(sampler: RemoteSampler) -> list[str]:
    return [replica.replica for replica in sampler.directory.replicas(BASE_NAME)]
