"""A catalog with workers and a replica, on a real bus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from shared.bus import Bus, Table, table_for
from tests.catalog_world import World, open_world


@pytest.fixture
def bus_table() -> Table:
    """Messages that a killed server had handed out come again soon."""
    return table_for(("tiny-llama",), ack_wait_s=2.0)


@pytest.fixture
async def world(tmp_path: Path, make_bus: Callable[[], Bus]) -> AsyncIterator[World]:
    async with open_world(tmp_path, make_bus) as world:
        await world.start_workers()
        await world.start_replica()
        yield world
