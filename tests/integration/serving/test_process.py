"""`python -m services.serving` as a process: boots on real servers, serves, and ends in every way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from shared.bus import Bus, Table, table_for
from shared.errors import Refused
from shared.http import Health, HttpServer
from shared.ports import free_port
from shared.sampling.remote import RemoteSampler
from shared.store.s3 import S3Store
from tests.servers import NatsServer, S3Server
from tests.serving_kit import BASE_NAME, BASE_TOKEN, Catalog, Stage, ask, make_base, until


@pytest.fixture
def bus_table() -> Table:
    return table_for((BASE_TOKEN,))


@asynccontextmanager
async def _catalog_http(catalog: Catalog) -> AsyncIterator[str]:
    """The one catalog route that serving asks, over HTTP."""
    router = APIRouter()

    @router.get("/internal/v1/revisions/{tenant}/{policy}/{number}")
    async def revision(tenant: str, policy: str, number: int) -> Response:
        try:
            view = await catalog.revision(f"{tenant}/{policy}@{number}")
        except Refused as error:
            return JSONResponse({"error": {"code": error.code, "message": str(error)}}, status_code=error.status)
        return Response(view.model_dump_json(), media_type="application/json")

    listener = socket.create_server(("127.0.0.1", 0))
    async with HttpServer(Health("catalog"), listener) as server:
        server.app.include_router(router)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def _start(tmp_path: Path, nats: NatsServer, s3: S3Server, bucket: str, catalog_url: str, port: int) -> _Process:
    environment = {
        **os.environ,
        "MINT_NATS_URL": nats.url,
        "MINT_S3_URL": s3.url,
        "MINT_S3_ACCESS_KEY": s3.access_key,
        "MINT_S3_SECRET_KEY": s3.secret_key,
        "MINT_S3_BUCKET": bucket,
        "MINT_CATALOG_URL": catalog_url,
        "MINT_BASES_FILE": str(tmp_path / "bases.json"),
        "MINT_DATA_DIR": str(tmp_path / "data"),
        "MINT_PORT": str(port),
        "MINT_SERVING_BASE": BASE_NAME,
        "MINT_SERVING_ENGINE": "fake",
        "MINT_SERVING_DTYPE": "float32",
    }
    with (tmp_path / "serving.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.serving", env=environment, stdout=log, stderr=log
        )


_Process = asyncio.subprocess.Process


def _tail(log: Path) -> str:
    return log.read_text()[-3000:]


async def _wait_healthy(url: str, process: _Process, log: Path) -> None:
    async with httpx.AsyncClient() as http:
        for _ in range(300):
            assert process.returncode is None, _tail(log)
            try:
                if (await http.get(f"{url}/healthz")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)
    raise AssertionError(_tail(log))


async def test_a_replica_process_boots_serves_is_killed_comes_back_and_ends_with_0(
    tmp_path: Path, bus: Bus, store: S3Store, nats_server: NatsServer, s3_server: S3Server
) -> None:
    base = make_base(tmp_path / "base")
    bases = {"bases": [{"name": base.name, "token": base.token, "directory": str(base.directory)}]}
    (tmp_path / "bases.json").write_text(json.dumps(bases))
    stage = Stage(tmp_path, base, bus=bus, store=store)  # type: ignore[arg-type]
    manifest = await stage.add("acme/adder@1")
    await stage.desire("acme/adder@1", pinned=("acme/adder@1",))
    port, log = free_port(), tmp_path / "serving.log"
    url = f"http://127.0.0.1:{port}"
    async with _catalog_http(stage.catalog) as catalog_url, httpx.AsyncClient() as http:
        sampler = RemoteSampler(bus, http)
        arguments = (tmp_path, nats_server, s3_server, store._bucket, catalog_url, port)

        first = await _start(*arguments)
        await _wait_healthy(url, first, log)
        await sampler.start()
        await until(lambda: sampler.directory.ready(BASE_NAME, "acme/adder@1"))
        sampled = await sampler.sample(BASE_NAME, ask("acme/adder@1"))
        assert sampled.served.adapter_sha256 == manifest.adapter_sha256
        second = await _start(*arguments[:-1], free_port())
        assert await asyncio.wait_for(second.wait(), 30) == 1
        assert "MINT_SERVING_REPLICA" in log.read_text()
        first.kill()
        await first.wait()

        third = await _start(*arguments)
        await _wait_healthy(url, third, log)
        await until(
            lambda: (
                [r.boot_id for r in sampler.directory.ready(BASE_NAME, "acme/adder@1")]
                not in ([], [sampled.served.boot_id])
            )
        )
        again = await sampler.sample(BASE_NAME, ask("acme/adder@1"))
        assert again.sequences == sampled.sequences
        third.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(third.wait(), 15) == 0
        await until(lambda: not sampler.directory.replicas())
        await sampler.stop()
