from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.gateway.kit import Kit
from tests.unit.gateway.tinker.kit import Scene


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    kit = Kit(gateway_keys={"key-acme": "acme", "key-beta": "beta"}, gateway_hold_s=0.05)
    async with kit.http("key-acme") as http:
        found = Scene(kit, http)
        await found.begin()
        yield found
