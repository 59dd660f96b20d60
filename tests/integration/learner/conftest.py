"""A catalog on a real bus, and its client, for learners that work on operations."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import torch
from fastapi import FastAPI

from services.catalog.config import CatalogSettings
from shared.bases import load_bases
from shared.bus import Bus, Table, table_for
from shared.catalog.operations_client import OperationsClient
from tests.catalog_world import World
from tests.tiny import TINY_TOKEN, make_tiny_base, write_bases_file


@pytest.fixture
def bus_table() -> Table:
    return table_for((TINY_TOKEN,), ack_wait_s=2.0)


@pytest.fixture
async def world(tmp_path: Path, make_bus: Callable[[], Bus]) -> AsyncIterator[World]:
    """A catalog whose leases run out soon."""
    torch.set_num_threads(1)
    bases = load_bases(write_bases_file(tmp_path / "bases.json", make_tiny_base(tmp_path / "base")))
    world = World(tmp_path, make_bus, CatalogSettings(lease_ttl_s=2.0))
    world.bases = bases
    await world.start_catalog()
    try:
        yield world
    finally:
        await world.close()


@pytest.fixture
async def client(world: World) -> AsyncIterator[OperationsClient]:
    api = FastAPI()
    for router in world.app.routers:
        api.include_router(router)
    client = OperationsClient("http://catalog", transport=httpx.ASGITransport(api))
    yield client
    await client.close()
