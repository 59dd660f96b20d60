"""Serving replicas as processes of their own, on the fake engine, with a catalog that answers over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from shared.bases import Base
from shared.errors import Refused
from shared.http import Health, HttpServer
from shared.ports import free_port
from tests.servers import NatsServer, S3Server
from tests.serving_kit import Catalog


@asynccontextmanager
async def catalog_http(catalog: Catalog) -> AsyncIterator[str]:
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


@dataclass(frozen=True)
class Servers:
    nats: NatsServer
    s3: S3Server
    bucket: str
    catalog_url: str


@dataclass
class ServingProcess:
    process: asyncio.subprocess.Process
    url: str
    log: Path

    async def healthy(self) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            for _ in range(600):
                assert self.process.returncode is None, self.tail()
                try:
                    if (await http.get(f"{self.url}/healthz")).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)
        raise AssertionError(self.tail())

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    def tail(self) -> str:
        return self.log.read_text()[-3000:]


async def start_serving(
    directory: Path, base: Base, servers: Servers, replica: str = "", port: int | None = None
) -> ServingProcess:
    """`python -m services.serving` for `base`; its data lies in `directory`."""
    port = port or free_port()
    bases = {"bases": [{"name": base.name, "token": base.token, "directory": str(base.directory)}]}
    (directory / "bases.json").write_text(json.dumps(bases))
    environment = {
        **os.environ,
        "MINT_NATS_URL": servers.nats.url,
        "MINT_S3_URL": servers.s3.url,
        "MINT_S3_ACCESS_KEY": servers.s3.access_key,
        "MINT_S3_SECRET_KEY": servers.s3.secret_key,
        "MINT_S3_BUCKET": servers.bucket,
        "MINT_CATALOG_URL": servers.catalog_url,
        "MINT_BASES_FILE": str(directory / "bases.json"),
        "MINT_DATA_DIR": str(directory / "data"),
        "MINT_PORT": str(port),
        "MINT_SERVING_BASE": base.name,
        "MINT_SERVING_REPLICA": replica,
        "MINT_SERVING_ENGINE": "fake",
        "MINT_SERVING_DTYPE": "float32",
    }
    log = directory / f"serving-{replica or 'default'}.log"
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.serving", env=environment, stdout=output, stderr=output
        )
    return ServingProcess(process, f"http://127.0.0.1:{port}", log)
