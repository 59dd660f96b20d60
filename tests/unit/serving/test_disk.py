"""The disk tier: indexed, bounded, verified, and never robbed of what is about to be used."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from services.serving import disk
from services.serving.disk import DiskIndex
from services.serving.fetch import AdapterFiles
from shared.adapters import layout
from shared.adapters.manifest import Manifest
from tests.serving_kit import Stage, ask, make_base, running, tokens, until


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, make_base(tmp_path / "base"))


def _files(stage: Stage, max_bytes: int = 2**30, in_use: frozenset[str] = frozenset()) -> AdapterFiles:
    return AdapterFiles(stage.store, stage.directory / "files", max_bytes, lambda: in_use)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was hashed."""
    counts: Counter[str] = Counter()
    hash_file = layout.file_sha256

    def counting(path: Path) -> str:
        counts[path.name] += 1
        return hash_file(path)

    monkeypatch.setattr(layout, "file_sha256", counting)
    return counts


async def test_files_are_hashed_once_by_a_process_as_long_as_nothing_changes(
    stage: Stage, hashed: Counter[str]
) -> None:
    manifest = await stage.add("acme/adder@1")
    files = _files(stage)
    hashed.clear()
    directory, found = await files.ensure(manifest)
    assert found == "catalog"
    assert hashed == {layout.CONFIG_FILE: 1, layout.TENSOR_FILE: 1}
    assert await files.ensure(manifest) == (directory, "disk")
    assert hashed == {layout.CONFIG_FILE: 1, layout.TENSOR_FILE: 1}
    assert await _files(stage).ensure(manifest) == (directory, "disk")
    assert hashed == {layout.CONFIG_FILE: 2, layout.TENSOR_FILE: 2}


async def test_a_file_that_changed_under_its_old_size_and_time_is_seen_and_fetched_again(stage: Stage) -> None:
    manifest = await stage.add("acme/adder@1")
    files = _files(stage)
    directory, _ = await files.ensure(manifest)
    path = directory / layout.TENSOR_FILE
    stat = path.stat()
    path.write_bytes(bytes(stat.st_size))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert await files.ensure(manifest) == (directory, "catalog")
    assert layout.file_sha256(path) == manifest.files[layout.TENSOR_FILE].sha256


async def test_a_file_that_rots_after_it_was_verified_is_fetched_again_and_not_the_revisions_fault(
    stage: Stage,
) -> None:
    """Where no stamp tells, the engine's admission does."""
    manifest = await stage.add("acme/adder@1")
    await stage.add("acme/adder@2")
    async with running(stage.replica(capacity=1)) as replica:
        first = await tokens(replica, ask("acme/adder@1"))
        await tokens(replica, ask("acme/adder@2"))
        path = replica.files.root / manifest.adapter_sha256 / layout.TENSOR_FILE
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        entry = replica.files._index.get(manifest.adapter_sha256)
        assert entry is not None
        entry.proved = disk.stamps(path.parent, manifest.files)
        assert await tokens(replica, ask("acme/adder@1")) == first
        assert replica.residency.failures.given_up() == {}
    assert stage.store.fetched[manifest.files[layout.TENSOR_FILE].key] == 2


async def test_loads_list_no_directory_whatever_is_on_disk(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is read at start; 20 fetches through a tier that holds 4 scan nothing."""
    manifests = [await stage.add(f"acme/adder@{number}") for number in range(20)]
    files = _files(stage, max_bytes=4 * max(manifest.adapter_bytes for manifest in manifests))

    def scanned(*_: object) -> object:
        raise AssertionError("the directory was listed")

    monkeypatch.setattr(os, "scandir", scanned)
    monkeypatch.setattr(Path, "iterdir", scanned)
    monkeypatch.setattr(shutil, "rmtree", _remove_flat)
    for manifest in manifests:
        await files.ensure(manifest)
    assert files.on_disk() == [manifest.adapter_sha256 for manifest in manifests[-4:]]
    assert files.size() == (4, sum(manifest.adapter_bytes for manifest in manifests[-4:]))


def _remove_flat(path: Path) -> None:
    for name in (layout.CONFIG_FILE, layout.TENSOR_FILE):
        (path / name).unlink(missing_ok=True)
    path.rmdir()


async def test_the_index_of_a_new_process_is_the_old_ones_in_order_of_use(stage: Stage) -> None:
    manifests = [await stage.add(f"acme/adder@{number}") for number in (1, 2, 3)]
    files = _files(stage)
    for manifest in (*manifests, manifests[0]):
        directory, _ = await files.ensure(manifest)
        # As coarse as file times may be, uses are told apart.
        at = 1_000_000_000 + len(os.listdir(files.root)) + (manifest is manifests[0]) * 10
        os.utime(directory, (at, at))
    (files.root / "notes.txt").write_text("not an adapter")
    again = DiskIndex(files.root)
    assert again.digests() == files.on_disk()
    assert again.digests()[-1] == manifests[0].adapter_sha256
    assert again.bytes == sum(manifest.adapter_bytes for manifest in manifests)


async def test_two_revisions_of_one_adapter_are_one_fetch_and_one_directory(stage: Stage) -> None:
    first = await stage.add("acme/adder@1")
    second = first.model_copy(update={"revision": "other/adder@7"})
    files = _files(stage)
    found = await asyncio.gather(files.ensure(first), files.ensure(second))
    assert {directory for directory, _ in found} == {files.root / first.adapter_sha256}
    assert set(stage.store.fetched.values()) == {1}


async def test_fetches_side_by_side_keep_the_bound_together(stage: Stage) -> None:
    manifests = [await stage.add(f"acme/adder@{number}") for number in range(6)]
    size = max(manifest.adapter_bytes for manifest in manifests)
    files = _files(stage, max_bytes=3 * size)
    await asyncio.gather(*(files.ensure(manifest) for manifest in manifests[:3]))
    await asyncio.gather(*(files.ensure(manifest) for manifest in manifests[3:]))
    assert set(files.on_disk()) == {manifest.adapter_sha256 for manifest in manifests[3:]}


async def test_what_is_in_use_stays_even_above_the_bound(stage: Stage) -> None:
    first, second = await stage.add("acme/adder@1"), await stage.add("acme/adder@2")
    files = _files(stage, max_bytes=first.adapter_bytes, in_use=frozenset({first.adapter_sha256}))
    await files.ensure(first)
    await files.ensure(second)
    assert files.on_disk() == [first.adapter_sha256, second.adapter_sha256]


async def test_the_files_of_a_queued_load_are_not_removed_before_it_is_activated(stage: Stage) -> None:
    """prime-rl#1857: loads wait on disk while others are fetched into a tier that is too small for all."""
    manifests: dict[str, Manifest] = {}
    for number in range(1, 7):
        manifests[f"acme/adder@{number}"] = await stage.add(f"acme/adder@{number}")
    size = max(manifest.adapter_bytes for manifest in manifests.values())
    async with running(stage.replica(disk_bytes=size, capacity=8)) as replica:
        stage.controls.load_gate.clear()
        asking = [asyncio.create_task(tokens(replica, ask(revision))) for revision in manifests]
        await until(lambda: replica.residency.queue.stages()["fetched"] == 5)
        assert set(replica.files.on_disk()) == {manifest.adapter_sha256 for manifest in manifests.values()}
        stage.controls.load_gate.set()
        assert all(await asyncio.gather(*asking))
    tensors = [manifest.files[layout.TENSOR_FILE].key for manifest in manifests.values()]
    assert [stage.store.fetched[key] for key in tensors] == [1] * 6
    assert stage.controls.loads == dict.fromkeys(manifests, 1)
