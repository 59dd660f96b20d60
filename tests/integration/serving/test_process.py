"""`python -m services.serving` as a process: boots on real servers, serves, and ends in every way."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from shared.bus import Bus, Table, table_for
from shared.ports import free_port
from shared.sampling.remote import RemoteSampler
from shared.store.s3 import S3Store
from tests.sampling_stack import ready_on
from tests.servers import NatsServer, S3Server
from tests.serving_kit import BASE_NAME, BASE_TOKEN, Stage, ask, make_base, until
from tests.serving_process import Servers, ServingProcess, catalog_http, start_serving


@pytest.fixture
def bus_table() -> Table:
    return table_for((BASE_TOKEN,))


async def test_a_replica_process_boots_serves_is_killed_comes_back_and_ends_with_0(
    tmp_path: Path, bus: Bus, store: S3Store, nats_server: NatsServer, s3_server: S3Server
) -> None:
    base = make_base(tmp_path / "base")
    stage = Stage(tmp_path, base, bus=bus, store=store)  # type: ignore[arg-type]
    manifest = await stage.add("acme/adder@1")
    await stage.desire("acme/adder@1", pinned=("acme/adder@1",))
    port = free_port()
    async with catalog_http(stage.catalog) as catalog_url, httpx.AsyncClient() as http:
        sampler = RemoteSampler(bus, http)
        servers = Servers(nats_server, s3_server, store._bucket, catalog_url)

        first = await start_serving(tmp_path, base, servers, port=port)
        await first.healthy()
        await sampler.start()
        await until(lambda: ready_on(sampler.directory, BASE_NAME, "acme/adder@1"))
        sampled = await sampler.sample(BASE_NAME, ask("acme/adder@1"))
        assert sampled.served.adapter_sha256 == manifest.adapter_sha256
        second = await start_serving(tmp_path, base, servers)
        assert await _ended(second, 30) == 1
        assert "MINT_SERVING_REPLICA" in second.log.read_text()
        await first.kill()

        third = await start_serving(tmp_path, base, servers, port=port)
        await third.healthy()
        await until(
            lambda: (
                [r.boot_id for r in ready_on(sampler.directory, BASE_NAME, "acme/adder@1")]
                not in ([], [sampled.served.boot_id])
            )
        )
        again = await sampler.sample(BASE_NAME, ask("acme/adder@1"))
        assert again.sequences == sampled.sequences
        third.process.send_signal(signal.SIGTERM)
        assert await _ended(third, 15) == 0
        await until(lambda: not sampler.directory.replicas())
        await sampler.stop()


async def _ended(serving: ServingProcess, timeout_s: float) -> int:
    async with asyncio.timeout(timeout_s):
        return await serving.process.wait()
