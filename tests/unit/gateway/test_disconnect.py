"""A client that hangs up ends its generation, at whatever point."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.requests import Request

from services.gateway.streaming import ClientGone, turn
from tests.unit.gateway.kit import BASE, Client, Kit


def _body(stream: bool, n: int = 1) -> bytes:
    ask = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "stream": stream, "n": n}
    return json.dumps(ask).encode()


async def _until_open(kit: Kit, count: int) -> None:
    for _ in range(1000):
        if len(kit.sampler.open) >= count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{len(kit.sampler.open)} of {count} streams were opened")


@pytest.mark.parametrize("stream", [True, False])
async def test_hanging_up_closes_every_stream(kit: Kit, stream: bool) -> None:
    kit.sampler.held = asyncio.Event()
    client = Client(kit.app, "/v1/chat/completions", _body(stream, n=3))
    running = asyncio.create_task(client.run())
    await _until_open(kit, 3)
    if stream:
        await client.received.get()
    client.gone.set()
    async with asyncio.timeout(5):
        await running
    assert kit.sampler.open == []
    assert len(kit.sampler.closed) == 3


async def test_hanging_up_before_a_replica_answered_gives_up(kit: Kit) -> None:
    waiting = asyncio.Event()
    cancelled = asyncio.Event()

    class Loading:
        async def __aenter__(self) -> None:
            waiting.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async def __aexit__(self, *_: object) -> None: ...

    kit.sampler.stream = lambda base, request: Loading()  # type: ignore[method-assign,assignment,return-value]
    client = Client(kit.app, "/v1/chat/completions", _body(stream=True))
    running = asyncio.create_task(client.run())
    async with asyncio.timeout(5):
        await waiting.wait()
        client.gone.set()
        await running
    assert cancelled.is_set()
    assert (await client.received.get())["status"] == 499


async def test_a_stream_read_to_its_end_leaves_nothing_open(kit: Kit) -> None:
    client = Client(kit.app, "/v1/chat/completions", _body(stream=True, n=2))
    await client.run()
    assert kit.sampler.open == []
    assert len(kit.sampler.closed) == 2


async def test_a_turn_is_not_given_to_who_has_gone_and_is_free_again_behind_who_had_it() -> None:
    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def there() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    places = asyncio.Semaphore(1)
    async with turn(places, Request({"type": "http"}, there)):
        with pytest.raises(ClientGone):
            async with turn(places, Request({"type": "http"}, gone)):
                raise AssertionError("there is one place")
    assert not places.locked()
