"""Buckets on a real nats-server: compare-and-set, watches that survive restarts, keys that end by TTL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from shared.bus import Bus, Entry, StaleRevision, Table, table_for
from shared.bus.table import BucketSpec
from tests.integration.bus.helpers import eventually, reconnected
from tests.servers import NatsServer


@pytest.fixture
def bus_table() -> Table:
    buckets = (BucketSpec("residency", 0), BucketSpec("replicas", 1.5))
    return replace(table_for(["tiny-llama"]), buckets=buckets)


async def note(seen: list[tuple[str, bytes | None]], entries: AsyncIterator[Entry]) -> None:
    async for entry in entries:
        seen += [(entry.key, entry.value)]


async def test_get_put_delete(bus: Bus) -> None:
    bucket = bus.kv("residency")
    assert await bucket.get("tiny-llama") is None
    revision = await bucket.put("tiny-llama", b"one")
    assert await bucket.get("tiny-llama") == Entry("tiny-llama", b"one", revision)
    assert list(await bucket.entries()) == ["tiny-llama"]
    await bucket.delete("tiny-llama")
    await bucket.delete("never-there")
    assert await bucket.get("tiny-llama") is None
    assert await bucket.entries() == {}


async def test_compare_and_set_is_true(bus: Bus) -> None:
    bucket = bus.kv("residency")
    first = await bucket.cas("k", b"1", 0)
    second = await bucket.cas("k", b"2", first)
    for stale in (0, first):
        with pytest.raises(StaleRevision, match="residency/k is not at revision"):
            await bucket.cas("k", b"3", stale)
    assert await bucket.get("k") == Entry("k", b"2", second)


async def test_an_unknown_bucket_is_refused(bus: Bus) -> None:
    with pytest.raises(ValueError, match="no bucket 'other' in the bus table"):
        bus.kv("other")


async def test_watch_sees_what_is_what_changes_and_what_goes(bus: Bus, nats_server: NatsServer) -> None:
    bucket = bus.kv("residency")
    await bucket.put("a.1", b"old")
    await bucket.put("b.1", b"of no interest")
    seen: list[tuple[str, bytes | None]] = []
    task = asyncio.create_task(note(seen, bucket.watch("a.*", resync_s=0.5)))
    await eventually(lambda: seen == [("a.1", b"old")])
    await bucket.put("a.2", b"new")
    assert await eventually(lambda: seen[1:] == [("a.2", b"new")]) < 0.4
    await bucket.delete("a.1")
    await eventually(lambda: seen[2:] == [("a.1", None)])
    nats_server.restart()
    await eventually(lambda: reconnected(bus), 8)
    await bucket.put("a.2", b"newer")
    await eventually(lambda: seen[3:] == [("a.2", b"newer")], 8)
    task.cancel()


async def test_watch_sees_a_key_end_by_ttl(bus: Bus) -> None:
    bucket = bus.kv("replicas")
    seen: list[tuple[str, bytes | None]] = []
    task = asyncio.create_task(note(seen, bucket.watch(resync_s=0.3)))
    await bucket.put("tiny-llama.r1", b"here")
    await eventually(lambda: seen == [("tiny-llama.r1", b"here"), ("tiny-llama.r1", None)], 6)
    task.cancel()
