"""One suite for every object store: in memory and on a real SeaweedFS."""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from mint_schemas import FileRef

from shared.errors import Fatal
from shared.store.memory import MemoryStore
from shared.store.port import BytesDiffer, KeyTaken, ObjectMissing, ObjectStore
from shared.store.s3 import S3Store
from shared.store.sweep import sweep
from tests.servers import S3Server

BIG = b"0123456789abcdef" * 200_000


@pytest.fixture(params=["memory", "s3"])
async def any_store(request: pytest.FixtureRequest) -> AsyncIterator[ObjectStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    server: S3Server = request.getfixturevalue("s3_server")
    store = S3Store(server.url, server.access_key, server.secret_key, f"test-{uuid.uuid4().hex[:12]}")
    await store.ensure_bucket()
    await store.ensure_bucket()
    yield store
    store.close()


@pytest.mark.parametrize("content", [b"", b"one", BIG], ids=["empty", "small", "big"])
async def test_put_then_get(any_store: ObjectStore, content: bytes) -> None:
    ref = await any_store.put("attempts/r1/a/file.bin", content)
    digest = hashlib.sha256(content).hexdigest()
    assert ref == FileRef(key="attempts/r1/a/file.bin", sha256=digest, size=len(content))
    assert await any_store.get(ref) == content
    assert await any_store.size(ref.key) == len(content)


async def test_put_a_file_and_fetch_it(any_store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(BIG)
    ref = await any_store.put("blobs/sha256/x", source)
    target = tmp_path / "deep" / "er" / "target"
    await any_store.fetch(ref, target)
    assert target.read_bytes() == BIG
    assert [path.name for path in target.parent.iterdir()] == ["target"]


async def test_the_same_bytes_again_are_the_same_reference(any_store: ObjectStore) -> None:
    assert await any_store.put("data/acme/x", BIG) == await any_store.put("data/acme/x", BIG)


async def test_a_second_writer_with_other_bytes_is_refused(any_store: ObjectStore) -> None:
    """s3transfer#371: put-if-absent, also for the same size and for the writer that was first."""
    first = await any_store.put("data/acme/x", b"first")
    for other in (b"other", b"longer than the first", b""):
        with pytest.raises(KeyTaken, match="data/acme/x exists with other bytes"):
            await any_store.put("data/acme/x", other)
    assert await any_store.get(first) == b"first"


async def test_of_many_writers_at_once_one_wins(any_store: ObjectStore) -> None:
    contents = [f"writer {number}".encode() for number in range(8)]
    results = await asyncio.gather(*(any_store.put("data/acme/x", c) for c in contents), return_exceptions=True)
    won = [result for result in results if isinstance(result, FileRef)]
    assert len(won) == 1
    assert [type(result) for result in results if result is not won[0]] == [KeyTaken] * 7
    assert await any_store.get(won[0]) in contents


async def test_what_differs_from_its_reference_is_refused(any_store: ObjectStore, tmp_path: Path) -> None:
    """moto#9209: an ETag is no MD5 and proves nothing; sha256 and size do."""
    ref = await any_store.put("data/acme/x", b"content")
    for wrong in (ref.model_copy(update={"sha256": "0" * 64}), ref.model_copy(update={"size": 8})):
        with pytest.raises(BytesDiffer, match="data/acme/x"):
            await any_store.get(wrong)
        with pytest.raises(BytesDiffer, match="data/acme/x"):
            await any_store.fetch(wrong, tmp_path / "target")
    assert os.listdir(tmp_path) == []


async def test_a_missing_object_is_named(any_store: ObjectStore, tmp_path: Path) -> None:
    ref = FileRef(key="attempts/none", sha256="0" * 64, size=1)
    with pytest.raises(ObjectMissing, match="no object attempts/none"):
        await any_store.get(ref)
    with pytest.raises(ObjectMissing, match="no object attempts/none"):
        await any_store.fetch(ref, tmp_path / "target")
    assert await any_store.size("attempts/none") is None
    assert os.listdir(tmp_path) == []


async def test_list_and_delete(any_store: ObjectStore) -> None:
    for key in ("attempts/a/1", "attempts/a/2", "attempts/b/1", "data/acme/1"):
        await any_store.put(key, key.encode())
    found = [entry async for entry in any_store.list("attempts/a/")]
    assert [(entry.key, entry.size) for entry in found] == [("attempts/a/1", 12), ("attempts/a/2", 12)]
    assert all(abs(datetime.now(UTC) - entry.modified) < timedelta(minutes=1) for entry in found)
    await any_store.delete("attempts/a/1")
    await any_store.delete("attempts/a/1")
    assert [entry.key async for entry in any_store.list("attempts/a/")] == ["attempts/a/2"]
    assert [entry.key async for entry in any_store.list("nothing/")] == []


async def test_an_empty_prefix_is_an_error(any_store: ObjectStore) -> None:
    """aibrix#2029: an empty prefix counted as everything there is."""
    with pytest.raises(Fatal, match="an empty prefix would list the whole store"):
        [entry async for entry in any_store.list("")]


async def test_a_deleted_key_is_free_again(any_store: ObjectStore) -> None:
    await any_store.put("attempts/a", b"one")
    await any_store.delete("attempts/a")
    assert (await any_store.put("attempts/a", b"two")).size == 3


async def test_sweep_takes_what_is_old_and_unnamed(any_store: ObjectStore) -> None:
    for key in ("attempts/r/named", "attempts/r/orphan", "blobs/sha256/orphan", "data/acme/named", "other/kept"):
        await any_store.put(key, key.encode())
    asked: list[str] = []

    async def named(keys: list[str]) -> set[str]:
        asked.extend(keys)
        return {key for key in keys if key.endswith("/named")}

    assert await sweep(any_store, named) == []
    assert asked == []
    later = datetime.now(UTC) + timedelta(hours=25)
    assert await sweep(any_store, named, now=later) == ["attempts/r/orphan", "blobs/sha256/orphan"]
    assert [entry.key async for entry in any_store.list("attempts/")] == ["attempts/r/named"]
    assert await any_store.size("other/kept") == 10


async def age(store: ObjectStore) -> datetime:
    (modified,) = [entry.modified async for entry in store.list("blobs/")]
    return modified


async def test_putting_again_makes_an_object_young(any_store: ObjectStore) -> None:
    """An old unnamed blob that a new attempt shares must not be swept before its row is written."""
    await any_store.put("blobs/sha256/x", b"shared")
    before = await age(any_store)
    await asyncio.sleep(1.1)
    ref = await any_store.put("blobs/sha256/x", b"shared")
    after = await age(any_store)
    assert after > before
    assert await any_store.get(ref) == b"shared"
