"""The openai client's surface on the fake engine, whose vocabulary and tokenizer are a real model's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from openai import OpenAI

from shared.bus import Bus, Table, table_for
from shared.text.codec import TextCodec
from tests.e2e.openai_checks import CHECKS
from tests.e2e.openai_surface import KEY, Surface
from tests.gateway_world import worded_base, world
from tests.serving_kit import BASE_NAME, BASE_TOKEN, Stage


@pytest.fixture
def bus_table() -> Table:
    return table_for((BASE_TOKEN,))


@pytest.fixture
async def surface(tmp_path: Path, bus: Bus) -> AsyncIterator[Surface]:
    stage = Stage(tmp_path, worded_base(tmp_path / "base"), bus=bus)
    manifest = await stage.add("acme/adder@1")
    async with world(stage, TextCodec.load(stage.base.directory)) as found:
        with OpenAI(base_url=f"{found.url}/v1", api_key=KEY, timeout=60.0, max_retries=0) as client:
            policy = ("acme/adder", "acme/adder@1", manifest.adapter_sha256)
            yield Surface(found.url, client, BASE_NAME, *policy, speaks=BASE_NAME)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_clients_surface(surface: Surface, check: Callable[[Surface], None]) -> None:
    await asyncio.to_thread(check, surface)
