"""A worker process that ends in the middle: by SIGTERM, and by SIGKILL at each of the four fault points."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
import uvicorn

from shared.bus import Bus, Received, Table, table_for
from shared.bus.provisioner import provision
from shared.ports import free_port
from shared.store.s3 import S3Store
from tests.integration.bus.helpers import DURABLE, empty, eventually, send, waiting
from tests.integration.worker.catalog_double import CatalogDouble
from tests.integration.worker.worker_process import FAULTS_ACK_WAIT_S
from tests.servers import NatsServer, S3Server

SCRIPT = Path(__file__).with_name("worker_process.py")
ID = "r1:evaluation:base"


@pytest.fixture
def bus_table(request: pytest.FixtureRequest) -> Table:
    short = "shell" not in request.node.name
    return table_for(["tiny-llama"], ack_wait_s=FAULTS_ACK_WAIT_S) if short else table_for(["tiny-llama"])


@pytest.fixture
async def catalog() -> AsyncIterator[tuple[CatalogDouble, str]]:
    double, port = CatalogDouble(ttl_s=1.0), free_port()
    server = uvicorn.Server(uvicorn.Config(double.app(), port=port, log_config=None, lifespan="off"))
    server.capture_signals = _no_signals  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.started)
    yield double, f"http://127.0.0.1:{port}"
    server.should_exit = True
    await task


class _no_signals:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def bases_file(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "model.safetensors").write_bytes(b"weights")
    path = tmp_path / "bases.json"
    entry = {"name": "tiny/llama", "token": "tiny-llama", "directory": str(directory)}
    path.write_text(json.dumps({"bases": [entry]}))
    return path


Launch = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def launch(
    nats_server: NatsServer,
    s3_server: S3Server,
    store: S3Store,
    catalog: tuple[CatalogDouble, str],
    bases_file: Path,
    tmp_path: Path,
) -> Iterator[Launch]:
    started: list[subprocess.Popen[bytes]] = []

    def start(mode: str, **settings: str) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            "PYTHONPATH": str(Path.cwd()),
            "MINT_NATS_URL": nats_server.url,
            "MINT_S3_URL": s3_server.url,
            "MINT_S3_BUCKET": store._bucket,
            "MINT_CATALOG_URL": catalog[1],
            "MINT_BASES_FILE": str(bases_file),
            **settings,
        }
        with (tmp_path / "worker.log").open("ab") as log:
            started.append(subprocess.Popen([sys.executable, SCRIPT, mode, tmp_path], env=env, stderr=log))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)


async def ended(process: subprocess.Popen[bytes], within_s: float) -> int:
    await eventually(lambda: process.poll() is not None, within_s)
    return process.returncode


async def test_shell_gives_back_on_sigterm(
    bus: Bus, launch: Launch, catalog: tuple[CatalogDouble, str], tmp_path: Path
) -> None:
    """nats-server#5564: SIGTERM in the middle of a job that blocks a thread → another worker has the
    command in under a second, though its ack wait is 30 s; the process ends with 0."""
    process = launch("shell")
    await send(bus)
    await eventually(lambda: (tmp_path / "began").exists(), 60)
    got: list[float] = []

    async def take(received: Received) -> None:
        got.append(time.monotonic())

    await bus.consume(DURABLE, take)
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    await eventually(lambda: bool(got), 5)
    assert got[0] - asked < 1.0
    assert await ended(process, 10) == 0
    assert [release.failure for release in catalog[0].releases] == [""]


async def test_shell_refuses_a_bus_that_differs(
    bus: Bus, launch: Launch, nats_server: NatsServer, tmp_path: Path
) -> None:
    client = await nats.connect(nats_server.url)
    await provision(client.jetstream(), table_for(["tiny-llama"], ack_wait_s=9))
    await client.close()
    assert await ended(launch("shell"), 60) == 1
    log: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "worker.log").read_text().splitlines()]
    assert "ack_wait is 9.0, the table says 30.0" in log[-1]["message"]


@pytest.mark.parametrize("point", ["before_files", "after_files", "after_row", "after_publish"])
async def test_killed_at_a_point_the_command_is_still_done_once(
    bus: Bus, launch: Launch, catalog: tuple[CatalogDouble, str], point: str, tmp_path: Path
) -> None:
    settings = {"MINT_FAULT": f"evaluator:{point}", "MINT_FAULT_DIR": str(tmp_path / "faults")}
    first = launch("faults", **settings)
    await send(bus)
    assert await ended(first, 60) == -signal.SIGKILL
    launch("faults", **settings)
    await eventually(lambda: empty(bus), 60)
    assert await waiting(bus, "EVENTS") == 1
    assert await waiting(bus, "DEAD") == 0
    assert catalog[0].commands[ID].takes == (1 if point in ("after_row", "after_publish") else 2)
