"""Fixtures that more than one kind of test needs: real servers, a store, a provisioned bus."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import nats
import pytest

from shared.bus import Bus, Table, table_for
from shared.bus.provisioner import provision
from shared.store.s3 import S3Store
from tests.servers import NatsServer, S3Server

TOKENS = ("tiny-llama", "smollm2-135m")


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A fresh nats-server with JetStream on disk: `.url`, `.kill()`, `.restart()`."""
    server = NatsServer(tmp_path / "nats").start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One SeaweedFS for the session: `.url`, `.access_key`, `.secret_key`."""
    server = S3Server(tmp_path_factory.mktemp("s3")).start()
    yield server
    server.kill()


@pytest.fixture
async def store(s3_server: S3Server) -> AsyncIterator[S3Store]:
    """An S3 store on a bucket of its own."""
    store = S3Store(s3_server.url, s3_server.access_key, s3_server.secret_key, f"test-{uuid.uuid4().hex[:12]}")
    await store.ensure_bucket()
    yield store
    store.close()


@pytest.fixture
def bus_table() -> Table:
    """Override in a module for other tokens or a shorter ack wait."""
    return table_for(TOKENS)


@pytest.fixture
async def make_bus(nats_server: NatsServer, bus_table: Table) -> AsyncIterator[Callable[[], Bus]]:
    """Provisions the bus; each call gives one more (not yet connected) `Bus`, closed at the end."""
    client = await nats.connect(nats_server.url)
    await provision(client.jetstream(), bus_table)
    await client.close()
    made: list[Bus] = []

    def make() -> Bus:
        made.append(Bus(nats_server.url, bus_table))
        return made[-1]

    yield make
    for bus in made:
        await bus.close()


@pytest.fixture
async def bus(make_bus: Callable[[], Bus]) -> Bus:
    """A connected bus on a provisioned server."""
    bus = make_bus()
    await bus.connect()
    await bus.check()
    return bus
