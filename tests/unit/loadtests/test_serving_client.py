"""The load tests' own instruments: a client that reads streams right, a judge that sees a wrong revision."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from loadtests.population.churn import DIGEST, _reigns, _right
from loadtests.population.client import Answer, Ask, Client, percentile, words

HEAD = b"HTTP/1.1 200 OK\r\nmint-revision: acme/adder@3\r\nconnection: close\r\n\r\n"
FIRST = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'


@asynccontextmanager
async def server(parts: Sequence[bytes]) -> AsyncIterator[str]:
    """Answers each request with the parts, one write each."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()

    running = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with running:
        yield f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}"


async def answer_to(parts: Sequence[bytes]) -> Answer:
    async with server(parts) as url, Client(url) as client:
        return await client.ask(Ask("acme/adder", "hello"))


async def test_a_stream_cut_anywhere_gives_its_tokens_its_revision_and_its_times() -> None:
    second = b'data: {"choices":[{"text":"b"}]}\n\n'
    answer = await answer_to([HEAD, FIRST[:9], FIRST[9:] + b": still here\n\n" + second[:20], second[20:], USAGE,
                              b"data: [DONE]\n\n"])  # fmt: skip
    assert answer.ok
    assert (answer.tokens, len(answer.gaps), answer.revision) == (2, 1, "acme/adder@3")


async def test_a_stream_without_its_end_is_an_error() -> None:
    answer = await answer_to([HEAD, FIRST])
    assert not answer.ok
    assert answer.error == "the stream ended without [DONE]"


async def test_an_error_event_and_a_refusal_are_answers_with_an_error() -> None:
    broken = await answer_to([HEAD, FIRST, b'data: {"error":{"message":"the engine died"}}\n\n'])
    refused = await answer_to([b"HTTP/1.1 503 No\r\ncontent-length: 4\r\nconnection: close\r\n\r\nbusy"])
    assert "the engine died" in (broken.error or "")
    assert (refused.status, refused.error) == (503, "busy")


async def test_a_closed_loop_asks_everything_once() -> None:
    async with server([HEAD, FIRST, USAGE, b"data: [DONE]\n\n"]) as url, Client(url) as client:
        load = await client.closed([Ask("acme/adder", words(number)) for number in range(7)], 3)
    assert len(load.good) == 7
    assert load.errors == []


def test_percentiles_interpolate_and_need_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    with pytest.raises(ValueError, match="nothing to measure"):
        percentile([], 0.5)


def test_an_answer_of_a_revision_that_the_alias_had_left_before_the_request_is_wrong() -> None:
    offset = time.time() - time.perf_counter()

    def stamp(at: float) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at + offset)) + "Z"

    moves = [
        {"version": 1, "revision": "a/b@1", "at": stamp(100.0)},
        {"version": 2, "revision": "a/b@2", "at": stamp(200.0)},
    ]
    reigns = _reigns(moves, {"a/b@2": 203.0}, {"a/b@1": "one", "a/b@2": "two"})
    assert (reigns["a/b@1"].until, reigns["a/b@2"].until) == (203.0, math.inf)

    def right(revision: str, digest: str, began: float) -> bool:
        headers = {"mint-revision": revision, DIGEST: digest}
        return _right(Answer("a/b", began, ttft=1.0, headers=headers), reigns)

    assert right("a/b@1", "one", 150.0)
    assert right("a/b@1", "one", 202.0)
    assert not right("a/b@1", "one", 204.0)
    assert not right("a/b@2", "two", 190.0)
    assert right("a/b@2", "two", 204.0)
    assert not right("a/b@2", "one", 204.0)
    assert not right("a/b@3", "two", 204.0)
