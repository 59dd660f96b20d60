"""Delivery on a real nats-server: retried, dead-lettered, heartbeaten, given back, never dropped."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

import pytest

from shared.bus import CATALOG_DEAD, Bus, Received, Table, table_for
from shared.errors import Fatal, Retryable
from tests.integration.bus.helpers import (
    DURABLE,
    SUBJECT,
    TYPE,
    command,
    empty,
    eventually,
    jetstream,
    reconnected,
    send,
    waiting,
)
from tests.servers import NatsServer

ACK_WAIT_S = 0.6
LONGER_S = 1.5
"""Where a heartbeat that a busy machine delays must not count as none."""


@pytest.fixture
def bus_table() -> Table:
    return table_for(["tiny-llama"], ack_wait_s=ACK_WAIT_S, max_deliver=3)


async def test_a_handler_failing_once_is_retried(bus: Bus) -> None:
    """faststream#1598: with the framework's default one exception is the end of a message."""
    seen: list[int] = []

    async def handle(received: Received) -> None:
        seen.append(received.deliveries)
        if len(seen) == 1:
            raise RuntimeError("a hiccup")

    await bus.consume(DURABLE, handle)
    await send(bus)
    await eventually(lambda: seen == [1, 2])
    await eventually(lambda: empty(bus))
    assert await waiting(bus, "DEAD") == 0


async def test_fatal_is_one_dead_letter_with_reason_and_headers(bus: Bus) -> None:
    async def handle(received: Received) -> None:
        raise Fatal("rank 64 is above 32; ask for at most 32")

    dead: list[Received] = []

    async def bury(received: Received) -> None:
        dead.append(received)

    await bus.consume(DURABLE, handle)
    await bus.consume(CATALOG_DEAD, bury)
    await send(bus)
    await eventually(lambda: len(dead) == 1)
    await eventually(lambda: empty(bus))
    letter = dead[0]
    assert letter.dead_reason == "rank 64 is above 32; ask for at most 32"
    assert letter.headers["mint-dead-subject"] == SUBJECT
    assert letter.subject == "mint.v1.dead.evaluation.requested.tiny-llama"
    assert (letter.envelope.type, letter.envelope.id, letter.envelope.source) == (
        TYPE,
        "r1:evaluation",
        "mint/catalog",
    )
    assert letter.decode(type(command())) == command()
    assert await waiting(bus, "DEAD") == 1


async def test_poison_leaves_one_dead_letter_and_commands_empty(bus: Bus) -> None:
    """nats-server#5564: max_deliver alone leaves the message behind."""
    tries: list[float] = []

    async def handle(received: Received) -> None:
        tries.append(time.monotonic())
        raise RuntimeError("always")

    await bus.consume(DURABLE, handle)
    await send(bus)
    await eventually(lambda: empty(bus), 6)
    assert await waiting(bus, "DEAD") == 1
    message = await jetstream(bus).get_msg("DEAD", seq=1)
    assert message.headers["mint-dead-reason"] == "gave up after 3 deliveries: RuntimeError: always"
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert len(gaps) == 2
    assert 0.4 < gaps[0] < gaps[1]


HEADERS = {"ce-specversion": "1.0", "ce-id": "x", "ce-source": "product", "ce-type": TYPE}


@pytest.mark.parametrize(
    ("headers", "body", "reason"),
    [
        (HEADERS, b'{"policy": ', "the body is not JSON: .*line 1 column 12"),
        (HEADERS, b"\xff\xfe\x00", "the body is not JSON"),
        (HEADERS, b"", "the body is not JSON"),
        (HEADERS, b"[1, 2]", "the body is a JSON list; an object is expected"),
        (HEADERS, b"{}", "the body of mint.v1.evaluation.requested is not valid: command_id: is required"),
        (None, b"{}", "header ce-specversion is missing; send CloudEvents 1.0 in binary mode"),
        ({**HEADERS, "ce-specversion": "0.3"}, b"{}", "ce-specversion is '0.3'; only '1.0' is understood"),
        ({**HEADERS, "ce-type": "mint.v1.run.failed"}, b"{}", "ce-type is 'mint.v1.run.failed' but the subject is"),
    ],
)
async def test_what_cannot_be_understood_is_dead_with_words(
    bus: Bus, headers: dict[str, str] | None, body: bytes, reason: str
) -> None:
    async def handle(received: Received) -> None:
        received.decode(type(command()))

    dead: list[Received] = []

    async def bury(received: Received) -> None:
        dead.append(received)

    await bus.consume(DURABLE, handle)
    await bus.consume(CATALOG_DEAD, bury)
    await jetstream(bus).publish(SUBJECT, body, headers=headers)
    await eventually(lambda: len(dead) == 1)
    await eventually(lambda: empty(bus))
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(dead[0].dead_reason)
    assert dead[0].body == body
    assert dead[0].envelope.type == (headers or HEADERS)["ce-type"]


@pytest.mark.parametrize("bus_table", [table_for(["tiny-llama"], ack_wait_s=LONGER_S, max_deliver=3)])
async def test_two_workers_and_a_long_blocking_job_run_once(make_bus: Callable[[], Bus]) -> None:
    """nats.go#1929, taskiq-nats#27: jobs of five ack waits, in threads, on two workers."""
    runs: list[str] = []

    async def handle(received: Received) -> None:
        runs.append(received.envelope.id)
        await asyncio.to_thread(time.sleep, 5 * LONGER_S)

    workers = [make_bus(), make_bus()]
    for worker in workers:
        await worker.connect()
        await worker.consume(DURABLE, handle)
    for number in (1, 2, 3):
        await send(workers[0], number)
    await eventually(lambda: empty(workers[0]), 40)
    assert sorted(runs) == ["r1:evaluation", "r2:evaluation", "r3:evaluation"]


async def test_retryable_names_its_own_delay(bus: Bus) -> None:
    """A busy lease comes back after its remaining time, not at once and not after a growing delay."""
    at: list[float] = []

    async def handle(received: Received) -> None:
        at.append(time.monotonic())
        if len(at) == 1:
            raise Retryable("another worker holds the lease", delay_s=1.0)

    await bus.consume(DURABLE, handle)
    await send(bus)
    await eventually(lambda: len(at) == 2)
    assert 0.95 < at[1] - at[0] < 1.6


async def test_a_message_given_back_reaches_another_worker_within_a_second(make_bus: Callable[[], Bus]) -> None:
    first, second = make_bus(), make_bus()
    began, got = asyncio.Event(), asyncio.Event()

    async def hang(received: Received) -> None:
        began.set()
        await asyncio.sleep(60)

    async def take(received: Received) -> None:
        got.set()

    await first.connect()
    await first.consume(DURABLE, hang)
    await send(first)
    await asyncio.wait_for(began.wait(), 5)
    await second.connect()
    await second.consume(DURABLE, take)
    started = time.monotonic()
    await first.drain()
    await asyncio.wait_for(got.wait(), 5)
    assert time.monotonic() - started < ACK_WAIT_S
    await eventually(lambda: empty(second))


async def test_nothing_is_taken_and_kept_while_draining(make_bus: Callable[[], Bus]) -> None:
    """Messages that arrive during the shutdown are neither lost nor held until their ack wait."""
    first, second = make_bus(), make_bus()
    done: list[str] = []

    async def handle(received: Received) -> None:
        done.append(received.envelope.id)

    await first.connect()
    await second.connect()
    await first.consume(DURABLE, handle, concurrency=4)
    sending = [asyncio.create_task(send(second, number)) for number in range(40)]
    await asyncio.sleep(0.02)
    await first.drain()
    await asyncio.gather(*sending)
    await second.consume(DURABLE, handle, concurrency=4)
    await eventually(lambda: empty(second))
    assert sorted(done) == sorted(f"r{number}:evaluation" for number in range(40))


@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_consumed_within_ten_seconds_after_a_restart(bus: Bus, nats_server: NatsServer, end: str) -> None:
    """nats.py#504: the pull consumer must not be dead after the server came back."""
    seen: list[str] = []

    async def handle(received: Received) -> None:
        seen.append(received.envelope.id)

    await bus.consume(DURABLE, handle)
    await send(bus, 1)
    await eventually(lambda: len(seen) == 1)
    getattr(nats_server, end)()
    nats_server.start()
    started = time.monotonic()
    await eventually(lambda: reconnected(bus), 8)
    await send(bus, 2)
    await eventually(lambda: len(seen) == 2, 10)
    assert time.monotonic() - started < 10
    await send(bus, 3)
    await eventually(lambda: len(seen) == 3, 5)


async def test_a_cancellation_inside_a_handler_does_not_end_the_consumer(bus: Bus) -> None:
    seen: list[int] = []

    async def handle(received: Received) -> None:
        seen.append(received.deliveries)
        if len(seen) == 1:
            raise asyncio.CancelledError

    await bus.consume(DURABLE, handle)
    await send(bus)
    await eventually(lambda: len(seen) == 2)
    await eventually(lambda: empty(bus))


async def test_concurrency_is_bounded(bus: Bus) -> None:
    running, most = 0, 0

    async def handle(received: Received) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1

    await bus.consume(DURABLE, handle, concurrency=3)
    for number in range(9):
        await send(bus, number)
    await eventually(lambda: empty(bus))
    assert most == 3


async def test_a_failing_dead_letter_consumer_does_not_multiply_letters(bus: Bus) -> None:
    async def handle(received: Received) -> None:
        raise Fatal("no")

    await bus.consume(DURABLE, handle)
    await bus.consume(CATALOG_DEAD, handle)
    await send(bus)
    await eventually(lambda: empty(bus))
    await asyncio.sleep(0.3)
    assert await waiting(bus, "DEAD") == 1
