"""A replica over real HTTP and a real bus: routed, streamed, aborted, gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import nats
import pytest

from services.serving.limits import Bound, LimitSettings, RequestLimits
from services.serving.replica import ServingReplica
from services.serving.turns import TurnBounds, Turns
from shared.bus import Bus, Table, table_for
from shared.engine.port import SamplingSettings
from shared.errors import Refused, Retryable
from shared.http import Health, HttpServer
from shared.residency import REPLICAS_BUCKET
from shared.sampling import wire
from shared.sampling.directory import ReplicaDirectory
from shared.sampling.port import SampleStream
from shared.sampling.remote import RemoteSampler
from tests.sampling_stack import ready_on
from tests.servers import NatsServer
from tests.serving_kit import BASE_NAME, BASE_TOKEN, VOCABULARY, Stage, ask, make_base, until


@pytest.fixture
def bus_table() -> Table:
    return table_for((BASE_TOKEN,))


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient() as client:
        yield client


@pytest.fixture
async def sampler(bus: Bus, http: httpx.AsyncClient) -> AsyncIterator[RemoteSampler]:
    sampler = RemoteSampler(bus, http)
    yield sampler
    await sampler.stop()


@pytest.fixture
def stage(tmp_path: Path, bus: Bus) -> Stage:
    return Stage(tmp_path, make_base(tmp_path / "base"), bus=bus)


@dataclass
class Served:
    replica: ServingReplica
    server: HttpServer
    url: str


@asynccontextmanager
async def serving(
    stage: Stage, healthy: bool = True, turns: TurnBounds | None = None, requests: LimitSettings | None = None
) -> AsyncIterator[Served]:
    """The stage's replica behind the service shell's own HTTP server, with other bounds where they are given."""
    listener = socket.create_server(("127.0.0.1", 0))
    stage.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    replica, health = stage.replica(), Health("serving")
    if turns is not None:
        replica.sampler._turns = Turns(turns)
    if requests is not None:
        replica.sampler._limits = RequestLimits(requests)
    async with HttpServer(health, listener) as server:
        for router in replica.routers:
            server.app.include_router(router)
        await replica.start()
        health.ready(stage.bus.ping, replica.healthy)
        try:
            if healthy:
                await until(lambda: replica.healthy() is None, lambda: str(replica.healthy()))
            yield Served(replica, server, stage.url)
        finally:
            await replica.stop()


async def _seen(sampler: RemoteSampler, count: int, timeout_s: float = 10.0) -> None:
    await sampler.start()
    await until(lambda: len(sampler.directory.replicas(BASE_NAME)) == count, timeout_s=timeout_s)


async def _all(stream: SampleStream) -> None:
    async for _ in stream.chunks:
        pass


async def test_a_sample_by_base_and_revision_says_what_ran(stage: Stage, sampler: RemoteSampler) -> None:
    manifest = await stage.add("acme/adder@1")
    await stage.desire("acme/adder@1", pinned=("acme/adder@1",))
    async with serving(stage) as served:
        await _seen(sampler, 1)
        sampled = await sampler.sample(BASE_NAME, ask("acme/adder@1", n=3, seed=5))
        again = await sampler.sample(BASE_NAME, ask("acme/adder@1", n=3, seed=5))
        plain = await sampler.sample(BASE_NAME, ask())
        boot = served.replica.supervisor.boot_id
    assert sampled.sequences == again.sequences
    assert [len(sequence.token_ids) for sequence in sampled.sequences] == [4, 4, 4]
    assert all(len(sequence.logprobs or ()) == 4 for sequence in sampled.sequences)
    assert (sampled.served.adapter_sha256, sampled.served.boot_id) == (manifest.adapter_sha256, boot)
    assert sampled.served.base_sha256 == stage.base.sha256
    assert (plain.served.revision, plain.served.adapter_sha256) == (None, None)
    assert plain.sequences != sampled.sequences[:1]


async def test_50_first_requests_over_http_are_one_load(stage: Stage, sampler: RemoteSampler) -> None:
    """dynamo#5184: 50 parallel first requests → 1 fetch, 1 load, 50 × 200."""
    manifest = await stage.add("acme/adder@1")
    async with serving(stage):
        await _seen(sampler, 1)
        stage.store.gate.clear()
        asking = [asyncio.create_task(sampler.sample(BASE_NAME, ask("acme/adder@1"))) for _ in range(50)]
        await until(lambda: sum(stage.store.fetched.values()) > 0)
        stage.store.gate.set()
        answers = await asyncio.gather(*asking)
    assert len({answer.sequences for answer in answers}) == 1
    assert stage.controls.loads == {"acme/adder@1": 1}
    assert stage.store.fetched == {ref.key: 1 for ref in manifest.files.values()}


async def test_statuses_and_codes(stage: Stage, http: httpx.AsyncClient) -> None:
    await stage.add("acme/foreign@1", base_sha256="f" * 64)
    async with serving(stage) as served:

        async def post(body: bytes, base: str = BASE_NAME) -> tuple[int, str, str]:
            answer = await http.post(served.url + wire.SAMPLE_PATH, params={"base": base}, content=body)
            error = answer.json()["error"]
            return answer.status_code, error["code"], error["message"]

        status, code, message = await post(b'{"request_id": "x", "prompt": ["a"], "settings": {"max_tokens": 1}}')
        assert (status, code) == (400, "invalid_request")
        assert "prompt.0" in message
        bad = ask(settings=SamplingSettings(max_tokens=1, top_p=0.0))
        assert (await post(wire.encode_request(bad)))[:2] == (400, "invalid_request")
        outside = ask(prompt=(VOCABULARY,))
        assert "prompt" in (await post(wire.encode_request(outside)))[2]
        assert (await post(wire.encode_request(ask("acme/none@1"))))[:2] == (404, "unknown_revision")
        assert (await post(wire.encode_request(ask("acme/foreign@1"))))[:2] == (409, "refused")
        assert (await post(wire.encode_request(ask()), base="other/base"))[:2] == (409, "wrong_base")
        stage.controls.start_failures = 1_000_000
        stage.controls.engines[-1].die()
        await until(lambda: served.replica.healthy() is not None)
        answer = await http.post(served.url + wire.SAMPLE_PATH, content=wire.encode_request(ask()))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_down")
        assert int(answer.headers["Retry-After"]) >= 1
        assert (await http.get(f"{served.url}/healthz")).status_code == 503


async def test_a_callers_own_limit_is_429_and_retry_after_says_when(stage: Stage, http: httpx.AsyncClient) -> None:
    async with serving(stage, requests=LimitSettings(tenant=Bound(rate=0.1))) as served:

        async def post(tenant: str) -> httpx.Response:
            return await http.post(served.url + wire.SAMPLE_PATH, content=wire.encode_request(ask(tenant=tenant)))

        assert (await post("acme")).status_code == 200
        refused = await post("acme")
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "10")
        assert refused.json()["error"]["code"] == "rate_limited"
        assert "acme may send 0.1 requests per second" in refused.json()["error"]["message"]
        assert (await post("other")).status_code == 200
        assert [(await post("")).status_code for _ in range(3)] == [200, 200, 200]


async def test_a_full_queue_is_503_with_position_and_expected_wait(stage: Stage, http: httpx.AsyncClient) -> None:
    async with serving(stage, turns=TurnBounds(running=1, waiting=2)) as served:
        url, turns = served.url + wire.SAMPLE_PATH, served.replica.sampler._turns

        async def post(**changes: object) -> httpx.Response:
            return await http.post(url, content=wire.encode_request(ask(**changes)))  # type: ignore[arg-type]

        stage.controls.token_gate.clear()
        accepted = [asyncio.create_task(post()) for _ in range(3)]
        await until(lambda: turns.waiting == 2)
        refused = await post()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert refused.json()["error"]["queue_position"] == 3
        assert int(refused.headers["Retry-After"]) >= 1
        replica = served.replica.status.replica()
        assert replica is not None
        assert (replica.in_flight, replica.waiting) == (3, 2)
        stage.controls.token_gate.set()
        assert [(await answer).status_code for answer in accepted] == [200, 200, 200]
        stage.controls.token_gate.clear()
        accepted = [asyncio.create_task(post()) for _ in range(2)]
        await until(lambda: turns.waiting == 1)
        # As if the last turn had come 10 s after the one before.
        turns._pace.clear()
        turns._pace.extend((turns._clock() - 10.0, turns._clock()))
        late = await post(wait_s=0.05)
        assert (late.status_code, late.json()["error"]["queue_position"]) == (503, 2)
        assert late.json()["error"]["expected_wait_s"] >= 20
        assert int(late.headers["Retry-After"]) >= late.json()["error"]["expected_wait_s"]
        stage.controls.token_gate.set()
        assert [(await answer).status_code for answer in accepted] == [200, 200]


async def test_a_client_that_leaves_while_it_waits_for_its_turn_frees_its_place(
    stage: Stage, http: httpx.AsyncClient
) -> None:
    await stage.add("acme/adder@1")
    async with serving(stage, turns=TurnBounds(running=1), requests=LimitSettings(Bound(concurrency=2))) as served:
        url, turns = served.url + wire.SAMPLE_PATH, served.replica.sampler._turns

        def post() -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(http.post(url, content=wire.encode_request(ask("acme/adder@1", tenant="acme"))))

        stage.controls.token_gate.clear()
        first, leaving = post(), post()
        await until(lambda: turns.waiting == 1)
        assert (await post()).status_code == 429
        leaving.cancel()
        await until(lambda: turns.waiting == 0)
        await until(lambda: served.replica.sampler.in_flight == 1)
        next_one = post()
        await until(lambda: turns.waiting == 1)
        stage.controls.token_gate.set()
        assert [(await answer).status_code for answer in (first, next_one)] == [200, 200]
        await until(lambda: [entry.holds for entry in served.replica.residency.residents()] == [0])
        assert (served.replica.sampler.in_flight, turns.running) == (0, 0)


async def test_what_the_sampler_raises(stage: Stage, sampler: RemoteSampler) -> None:
    await sampler.start()
    with pytest.raises(Retryable, match="no serving replica of mini/llama is alive"):
        await sampler.sample(BASE_NAME, ask())
    await stage.add("acme/foreign@1", base_sha256="f" * 64)
    async with serving(stage) as served:
        await _seen(sampler, 1)
        for request, status in ((ask("acme/none@1"), 404), (ask("acme/foreign@1"), 409), (ask(max_tokens=9999), 400)):
            with pytest.raises(Refused) as refused:
                await sampler.sample(BASE_NAME, request)
            assert refused.value.status == status
        stage.controls.start_failures = 1_000_000
        stage.controls.engines[-1].die()
        await until(lambda: served.replica.healthy() is not None)
        with pytest.raises(Retryable) as busy:
            await sampler.sample(BASE_NAME, ask())
        assert busy.value.delay_s


async def test_residency_is_reported_by_tier(stage: Stage, http: httpx.AsyncClient) -> None:
    manifest = await stage.add("acme/adder@1")
    await stage.desire("acme/adder@1", pinned=("acme/adder@1",))
    async with serving(stage) as served:
        report = (await http.get(served.url + wire.RESIDENCY_PATH)).json()
        public = (await http.get(f"{served.url}/v1/residency")).json()
        metrics = (await http.get(f"{served.url}/metrics")).text
    assert public == report
    assert [entry["revision"] for entry in report["memory"]] == ["acme/adder@1"]
    assert (report["memory"][0]["pinned"], report["disk"]) == (True, [manifest.adapter_sha256])
    assert report["wanted"] == ["acme/adder@1"]
    assert "mint_revisions_resident" in metrics


async def test_a_client_that_leaves_ends_its_generation(stage: Stage, sampler: RemoteSampler) -> None:
    await stage.add("acme/adder@1")
    async with serving(stage) as served:
        await _seen(sampler, 1)
        request = ask("acme/adder@1", max_tokens=400)
        async with sampler.stream(BASE_NAME, request) as stream:
            await anext(stream.chunks)
            assert served.replica.sampler.in_flight == 1
            stage.controls.token_gate.clear()
        await until(lambda: served.replica.sampler.in_flight == 0)
        assert stage.controls.aborted == 1
        assert [entry.holds for entry in served.replica.residency.residents()] == [0]
        stage.controls.token_gate.set()
        assert (await sampler.sample(BASE_NAME, ask("acme/adder@1"))).sequences


async def test_a_client_that_leaves_while_its_revision_loads_lets_go(stage: Stage, sampler: RemoteSampler) -> None:
    await stage.add("acme/adder@1")
    async with serving(stage) as served:
        await _seen(sampler, 1)
        stage.controls.load_gate.clear()
        leaving = asyncio.create_task(sampler.sample(BASE_NAME, ask("acme/adder@1")))
        await until(lambda: stage.controls.loads)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: served.replica.sampler.in_flight == 0)
        stage.controls.load_gate.set()
        await until(lambda: [entry.holds for entry in served.replica.residency.residents()] == [0])


async def test_the_engine_dies_under_a_stream(stage: Stage, sampler: RemoteSampler) -> None:
    await stage.add("acme/adder@1")
    async with serving(stage):
        await _seen(sampler, 1)
        async with sampler.stream(BASE_NAME, ask("acme/adder@1", max_tokens=400)) as stream:
            await anext(stream.chunks)
            stage.controls.engines[-1].die()
            with pytest.raises(Retryable, match="broke off"):
                await _all(stream)
        await until(lambda: len(stage.controls.engines) == 2)


async def test_two_replicas_share_requests_and_a_lost_one_is_passed_over(stage: Stage, sampler: RemoteSampler) -> None:
    other = Stage(stage.directory, stage.base, stage.bus, stage.store, stage.catalog, name="mini-1")
    async with serving(stage):
        async with serving(other) as second:
            await _seen(sampler, 2)
            answers = [await sampler.sample(BASE_NAME, ask()) for _ in range(4)]
            assert {answer.served.replica for answer in answers} == {"mini-0", "mini-1"}
            second.server._server.force_exit = second.server._server.should_exit = True
            await second.server.ended
            answers = [await sampler.sample(BASE_NAME, ask()) for _ in range(4)]
            assert {answer.served.replica for answer in answers} == {"mini-0"}
        await _seen(sampler, 1)


async def test_a_revision_is_asked_where_it_is_ready(stage: Stage, sampler: RemoteSampler) -> None:
    await stage.add("acme/adder@1")
    other = Stage(stage.directory, stage.base, stage.bus, stage.store, stage.catalog, name="mini-1")
    async with serving(stage), serving(other):
        await _seen(sampler, 2)
        first = await sampler.sample(BASE_NAME, ask("acme/adder@1"))
        await until(lambda: len(ready_on(sampler.directory, BASE_NAME, "acme/adder@1")) == 1)
        for _ in range(5):
            assert (await sampler.sample(BASE_NAME, ask("acme/adder@1"))).served.replica == first.served.replica
    assert sum((stage.controls.loads + other.controls.loads).values()) == 1


async def test_a_replica_leaves_the_view_at_shutdown_and_within_the_ttl_when_killed(stage: Stage, bus: Bus) -> None:
    directory = ReplicaDirectory(bus, ttl_s=1.0)
    await directory.start()
    async with serving(stage) as served:
        await until(lambda: len(directory.replicas()) == 1)
        killed = served.replica.status.replica()
        assert killed is not None
    await until(lambda: not directory.replicas(), timeout_s=0.9)
    await bus.kv(REPLICAS_BUCKET).put(
        "mini.dead", killed.model_copy(update={"replica": "dead"}).model_dump_json().encode()
    )
    await until(lambda: [replica.replica for replica in directory.replicas()] == ["dead"])
    await until(lambda: not directory.replicas(), timeout_s=2.0)
    await directory.stop()


async def test_announcements_and_ready_events_are_on_the_bus(
    stage: Stage, bus: Bus, nats_server: NatsServer, sampler: RemoteSampler
) -> None:
    manifest = await stage.add("acme/adder@1")
    await stage.desire("acme/adder@1")
    async with serving(stage) as served:
        entry = await bus.kv(REPLICAS_BUCKET).get("mini.mini-0")
        assert entry is not None
        assert entry.value is not None
        await _seen(sampler, 1)
        await until(lambda: ready_on(sampler.directory, BASE_NAME, "acme/adder@1"))
        found = ready_on(sampler.directory, BASE_NAME, "acme/adder@1")[0]
        assert (found.url, found.ready[0].adapter_sha256) == (served.url, manifest.adapter_sha256)
        client = await nats.connect(nats_server.url)
        subscription = await client.jetstream().subscribe("mint.v1.revision.ready.mini", ordered_consumer=True)
        message = await subscription.next_msg(timeout=5)
        assert message.header is not None
        assert message.header["ce-id"] == f"{served.replica.supervisor.boot_id}:acme/adder@1"
        await client.close()
    assert await bus.kv(REPLICAS_BUCKET).get("mini.mini-0") is None


async def test_a_restarted_bus_is_told_again(stage: Stage, nats_server: NatsServer, sampler: RemoteSampler) -> None:
    await stage.add("acme/adder@1")
    await stage.add("acme/adder@2")
    async with serving(stage) as served:
        await _seen(sampler, 1)
        nats_server.kill()
        await served.replica.residency.preload(["acme/adder@1"])
        await asyncio.to_thread(nats_server.restart)
        await until(lambda: ready_on(sampler.directory, BASE_NAME, "acme/adder@1"), timeout_s=15)
        await stage.desire("acme/adder@2")
        await until(lambda: ready_on(sampler.directory, BASE_NAME, "acme/adder@2"), timeout_s=15)


async def test_a_broken_announcement_is_ignored(bus: Bus, make_bus: Callable[[], Bus]) -> None:
    await bus.kv(REPLICAS_BUCKET).put("mini.broken", b"{")
    directory = ReplicaDirectory(bus)
    await directory.start()
    assert directory.replicas() == []
    await directory.stop()
