"""The instruments of the Tinker load test: a client that waits and says what failed, and where answers begin."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from loadtests.interface.loop import prompt_of
from loadtests.interface.wire import Wire
from services.learner.datum import Datum

SESSION = {"session_id": "s"}
FUTURE = {"request_id": "r"}
AGAIN = {"type": "try_again", "request_id": "r", "queue_state": "active"}


@asynccontextmanager
async def server(answers: Sequence[tuple[int, Any]]) -> AsyncIterator[str]:
    """Gives the answers one after the other, a connection each."""
    left = list(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.splitlines() if line.lower().startswith(b"content-length:"))
        await reader.readexactly(length)
        status, body = left.pop(0)
        data = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status, len(data), data))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    running = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with running:
        yield f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}"


async def called(answers: Sequence[tuple[int, Any]]) -> Any:
    async with server([(200, SESSION), *answers]) as url, Wire(url) as wire:
        assert wire.session == "s"
        return await wire.call("optim_step")


async def test_a_result_is_asked_for_until_it_is_there() -> None:
    assert await called([(200, FUTURE), (200, AGAIN), (200, AGAIN), (200, {"metrics": {}})]) == {"metrics": {}}


@pytest.mark.parametrize(
    "answers",
    [[(200, FUTURE), (200, {"error": "no gradients", "category": "user"})], [(400, {"detail": "no gradients"})]],
)
async def test_what_fails_fails_in_the_servers_words(answers: list[tuple[int, Any]]) -> None:
    with pytest.raises(RuntimeError, match="no gradients"):
        await called(answers)


def test_a_prompt_ends_where_the_answer_begins() -> None:
    """Position 2 predicts the first token that is learnt, and so belongs to the prompt."""
    row = Datum("row", (1, 2, 3, 4, 5), (2, 3, 4, 5, 6), (False, False, True, True, True))
    assert prompt_of(row) == (1, 2, 3)
