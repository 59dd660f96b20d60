"""The shell on real servers: what it waits for, when it is ready, and how it ends."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter

from shared.bus import Received
from shared.errors import Fatal
from shared.ports import free_port
from shared.service import Resources, serve
from shared.settings import CommonSettings
from tests.integration.bus.helpers import DURABLE, eventually, send
from tests.servers import NatsServer, S3Server


@dataclass
class App:
    """Remembers in which order things happened."""

    resources: Resources
    happened: list[str] = field(default_factory=list)
    routers: tuple[APIRouter, ...] = ()

    async def start(self) -> None:
        await self.resources.bus.consume(DURABLE, self.handle)
        self.happened.append("started")

    async def handle(self, received: Received) -> None:
        self.happened.append("began")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.happened.append("given back")
            raise

    async def stop(self) -> None:
        assert await self.resources.bus.ping()
        self.happened.append("stopped")

    def healthy(self) -> str | None:
        return None


@pytest.fixture
def settings(tmp_path: Path, s3_server: S3Server) -> CommonSettings:
    directory = tmp_path / "base"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "model.safetensors").write_bytes(b"weights")
    entry = {"name": "tiny/llama", "token": "tiny-llama", "directory": str(directory)}
    (tmp_path / "bases.json").write_text(json.dumps({"bases": [entry]}))
    return CommonSettings(s3_url=s3_server.url, bases_file=tmp_path / "bases.json", port=free_port())


def provision(settings: CommonSettings, **more: str) -> subprocess.CompletedProcess[str]:
    env = {"MINT_NATS_URL": settings.nats_url, "MINT_BASES_FILE": str(settings.bases_file), **more}
    command = [sys.executable, "-m", "shared.bus.provision"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def server(settings: CommonSettings, tmp_path: Path) -> Iterator[NatsServer]:
    """Provisioned once, and down."""
    server = NatsServer(tmp_path / "nats").start()
    done = provision(settings.model_copy(update={"nats_url": server.url}))
    assert (done.returncode, done.stderr) == (0, "")
    server.stop()
    yield server
    server.kill()


async def test_from_nothing_to_ready_to_the_end(settings: CommonSettings, server: NatsServer) -> None:
    settings = settings.model_copy(update={"nats_url": server.url})
    apps: list[App] = []

    @asynccontextmanager
    async def build(resources: Resources) -> AsyncIterator[App]:
        apps.append(App(resources))
        yield apps[-1]
        apps[-1].happened.append("closed")

    stop = asyncio.Event()
    running = asyncio.create_task(serve("evaluator", settings, build, stop))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", trust_env=False) as http:

        async def says(words: str) -> bool:
            try:
                return words in (await http.get("/healthz")).text
            except httpx.HTTPError:
                return False

        await eventually(lambda: says(f"the bus at {server.url} (no NATS server answers"), 10)
        server.start()
        await eventually(lambda: says('"ok"'), 15)
        (app,) = apps
        await send(app.resources.bus)
        await eventually(lambda: app.happened[-1:] == ["began"])
        stop.set()
        await asyncio.wait_for(running, 10)
    assert app.happened == ["started", "began", "given back", "stopped", "closed"]


async def test_stop_while_waiting(settings: CommonSettings) -> None:
    stop = asyncio.Event()
    settings = settings.model_copy(update={"nats_url": f"nats://127.0.0.1:{free_port()}"})

    @asynccontextmanager
    async def build(resources: Resources) -> AsyncIterator[App]:
        raise AssertionError("never ready")
        yield

    running = asyncio.create_task(serve("evaluator", settings, build, stop))
    await asyncio.sleep(0.5)
    stop.set()
    await asyncio.wait_for(running, 5)


async def test_a_service_that_cannot_be_built_ends_with_its_reason(
    settings: CommonSettings, nats_server: NatsServer
) -> None:
    settings = settings.model_copy(update={"nats_url": nats_server.url})
    assert (await asyncio.to_thread(provision, settings)).returncode == 0

    @asynccontextmanager
    async def build(resources: Resources) -> AsyncIterator[App]:
        raise Fatal("no engine for tiny/llama")
        yield

    with pytest.raises(Fatal, match="no engine for tiny/llama"):
        await asyncio.wait_for(serve("evaluator", settings, build, asyncio.Event()), 20)


def test_provisioning_says_what_is_wrong(settings: CommonSettings) -> None:
    nobody = settings.model_copy(update={"nats_url": f"nats://127.0.0.1:{free_port()}"})
    done = provision(nobody)
    assert done.returncode == 1
    assert f"cannot provision the bus at {nobody.nats_url}" in done.stderr
    done = provision(settings, MINT_BASES_FILE="/nowhere/bases.json")
    assert done.returncode == 1
    assert "/nowhere/bases.json" in done.stderr
