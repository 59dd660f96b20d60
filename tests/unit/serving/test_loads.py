"""Cold loads of a whole replica: shared, bounded, and whole or not there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from services.serving.errors import LoadFailed, Loading, QueueFull, Unavailable, UnknownRevision, WrongBase
from shared.adapters import layout
from shared.engine.port import LoadReport
from tests.serving_kit import Stage, ask, make_base, running, tokens, until


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, make_base(tmp_path / "base"))


async def test_50_concurrent_first_requests_are_one_fetch_and_one_load(stage: Stage) -> None:
    """dynamo#5184, vllm#15733."""
    manifest = await stage.add("acme/adder@1")
    async with running(stage.replica()) as replica:
        stage.store.gate.clear()
        asking = [asyncio.create_task(tokens(replica, ask("acme/adder@1"))) for _ in range(50)]
        await until(lambda: sum(stage.store.fetched.values()) > 0)
        await asyncio.sleep(0.05)
        stage.store.gate.set()
        answers = await asyncio.gather(*asking)
    assert len(set(answers)) == 1
    assert len(answers[0]) == 4
    assert stage.controls.loads == {"acme/adder@1": 1}
    assert stage.store.fetched == {ref.key: 1 for ref in manifest.files.values()}
    assert stage.catalog.asked == {"acme/adder@1": 1}


async def test_a_full_queue_refuses_at_once_and_serves_those_it_took(stage: Stage) -> None:
    for number in (1, 2, 3):
        await stage.add(f"acme/adder@{number}")
    async with running(stage.replica(queue_depth=2)) as replica:
        stage.controls.load_gate.clear()
        taken = [asyncio.create_task(tokens(replica, ask(f"acme/adder@{n}"))) for n in (1, 2)]
        await until(lambda: len(replica.residency.queue.waiting()) == 2)
        with pytest.raises(QueueFull) as refused:
            await tokens(replica, ask("acme/adder@3"))
        assert (refused.value.queue_position, refused.value.expected_wait_s) == (3, 3.0)
        assert refused.value.retry_after_s == 3.0
        stage.controls.load_gate.set()
        assert all(await asyncio.gather(*taken))


async def test_a_caller_that_leaves_does_not_stop_the_shared_load(stage: Stage) -> None:
    await stage.add("acme/adder@1")
    async with running(stage.replica()) as replica:
        stage.controls.load_gate.clear()
        leaving = asyncio.create_task(tokens(replica, ask("acme/adder@1")))
        staying = asyncio.create_task(tokens(replica, ask("acme/adder@1")))
        await until(lambda: stage.controls.loads["acme/adder@1"])
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        stage.controls.load_gate.set()
        assert await staying
    assert stage.controls.loads == {"acme/adder@1": 1}


async def test_a_wait_that_takes_too_long_is_answered_while_the_load_goes_on(stage: Stage) -> None:
    await stage.add("acme/adder@1")
    async with running(stage.replica(load_wait_s=0.05)) as replica:
        stage.controls.load_gate.clear()
        with pytest.raises(Loading) as late:
            await tokens(replica, ask("acme/adder@1"))
        assert (late.value.queue_position, late.value.expected_wait_s) == (1, 1.0)
        stage.controls.load_gate.set()
        await until(lambda: not replica.residency.queue.waiting())
        assert await tokens(replica, ask("acme/adder@1"))


async def test_a_truncated_file_in_the_store_is_refused_within_a_second_and_the_base_answers(stage: Stage) -> None:
    """vllm#3310, vllm#11702."""
    manifest = await stage.add("acme/adder@1")
    stage.store.truncate(manifest.files[layout.TENSOR_FILE].key)
    async with running(stage.replica()) as replica:
        before = await tokens(replica, ask())
        started = time.monotonic()
        with pytest.raises(LoadFailed, match="truncated in the store") as refused:
            await tokens(replica, ask("acme/adder@1"))
        assert time.monotonic() - started < 1
        assert refused.value.status == 409
        assert await tokens(replica, ask()) == before
        assert replica.files.on_disk() == []
        assert list(replica.files.root.iterdir()) == []


async def test_a_truncated_adapter_with_a_true_digest_is_refused_by_the_engine(stage: Stage, tmp_path: Path) -> None:
    """vllm#3310: the exporter itself wrote half a file."""
    manifest = await stage.add("acme/adder@1")
    content = await stage.store.get(manifest.files[layout.TENSOR_FILE])
    ref = await stage.store.put("blobs/half", content[: len(content) // 2])
    files = {**manifest.files, layout.TENSOR_FILE: ref}
    digest = layout.adapter_sha256({name: file.sha256 for name, file in files.items()})
    stage.catalog.add(manifest.model_copy(update={"files": files, "adapter_sha256": digest}))
    async with running(stage.replica()) as replica:
        before = await tokens(replica, ask())
        with pytest.raises(LoadFailed, match="truncated"):
            await tokens(replica, ask("acme/adder@1"))
        with pytest.raises(LoadFailed, match="truncated"):
            await tokens(replica, ask("acme/adder@1"))
        assert await tokens(replica, ask()) == before
    assert stage.controls.loads["acme/adder@1"] == 1


async def test_a_download_that_is_cut_off_is_fetched_again_whole(stage: Stage) -> None:
    """aibrix#2029."""
    manifest = await stage.add("acme/adder@1")
    stage.store.cuts = 2
    async with running(stage.replica()) as replica:
        assert await tokens(replica, ask("acme/adder@1"))
        directory = replica.files.root / manifest.adapter_sha256
        for name, ref in manifest.files.items():
            assert layout.file_sha256(directory / name) == ref.sha256
        assert [path.name for path in replica.files.root.iterdir()] == [manifest.adapter_sha256]


async def test_files_that_are_missing_in_the_store_fail_with_their_name(stage: Stage) -> None:
    """aibrix#2029: an empty prefix is an error, never an empty adapter."""
    manifest = await stage.add("acme/adder@1")
    await stage.store.delete(manifest.files[layout.CONFIG_FILE].key)
    async with running(stage.replica()) as replica:
        with pytest.raises(LoadFailed, match="no object"):
            await tokens(replica, ask("acme/adder@1"))
        stage.catalog.add(manifest.model_copy(update={"revision": "acme/adder@2", "files": {}}))
        with pytest.raises(LoadFailed, match="does not name adapter_config"):
            await tokens(replica, ask("acme/adder@2"))


async def test_attempts_are_bounded_then_failed_with_a_reason(stage: Stage) -> None:
    """aibrix#1860, aibrix#235."""
    await stage.add("acme/adder@1")
    stage.store.cuts = 100
    async with running(stage.replica()) as replica:
        with pytest.raises(LoadFailed, match="after 3 attempts"):
            await tokens(replica, ask("acme/adder@1"))
        with pytest.raises(LoadFailed, match="after 3 attempts"):
            await tokens(replica, ask("acme/adder@1"))
        assert sum(stage.store.fetched.values()) == 3
        announced = replica.status.replica()
        assert announced is not None
        assert (announced.ready, [failed.revision for failed in announced.failed]) == ((), ["acme/adder@1"])


async def test_what_nobody_foresaw_is_given_up_too(stage: Stage) -> None:
    """aibrix#1860: an engine's own bug in a load ends in a reason, not in loads without end."""
    await stage.add("acme/adder@1")

    def broken(report: LoadReport) -> LoadReport:
        raise RuntimeError("the engine has a bug")

    stage.controls.distort = broken
    async with running(stage.replica()) as replica:
        with pytest.raises(LoadFailed, match="after 3 attempts: the engine has a bug"):
            await tokens(replica, ask("acme/adder@1"))
        announced = replica.status.replica()
        assert announced is not None
        assert [failed.revision for failed in announced.failed] == ["acme/adder@1"]


async def test_files_on_disk_are_used_again_and_verified_first(stage: Stage) -> None:
    manifest = await stage.add("acme/adder@1")
    async with running(stage.replica()) as replica:
        first = await tokens(replica, ask("acme/adder@1"))
    async with running(stage.replica()) as replica:
        assert await tokens(replica, ask("acme/adder@1")) == first
    assert set(stage.store.fetched.values()) == {1}
    path = replica.files.root / manifest.adapter_sha256 / layout.TENSOR_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    async with running(stage.replica()) as replica:
        assert await tokens(replica, ask("acme/adder@1")) == first
    assert set(stage.store.fetched.values()) == {2}


async def test_what_a_killed_predecessor_left_half_fetched_is_removed_at_boot(stage: Stage) -> None:
    half = stage.directory / "serving" / stage.name / "adapters" / ".partial-dead"
    half.mkdir(parents=True)
    (half / layout.TENSOR_FILE).write_bytes(b"half")
    async with running(stage.replica()):
        assert not half.exists()


async def test_another_base_models_adapter_is_refused_before_a_byte_is_fetched(stage: Stage) -> None:
    """lorax#311."""
    await stage.add("acme/adder@1", base_sha256="f" * 64)
    async with running(stage.replica()) as replica:
        with pytest.raises(LoadFailed, match="was trained on") as refused:
            await tokens(replica, ask("acme/adder@1"))
    assert refused.value.status == 409
    assert not stage.store.fetched
    assert not stage.controls.loads
    assert WrongBase.status == 409


async def test_an_unknown_revision_is_an_error_and_known_once_it_is_registered(stage: Stage) -> None:
    async with running(stage.replica()) as replica:
        for name in ("acme/adder@1", "acme/adder", "ACME/x@1"):
            with pytest.raises(UnknownRevision):
                await tokens(replica, ask(name))
        await stage.add("acme/adder@1")
        assert await tokens(replica, ask("acme/adder@1"))


async def test_while_the_catalog_is_away_a_resident_revision_serves_and_a_cold_one_is_told_to_wait(
    stage: Stage,
) -> None:
    await stage.add("acme/adder@1")
    await stage.add("acme/adder@2")
    async with running(stage.replica()) as replica:
        first = await tokens(replica, ask("acme/adder@1"))
        stage.catalog.down = True
        assert await tokens(replica, ask("acme/adder@1")) == first
        with pytest.raises(Unavailable):
            await tokens(replica, ask("acme/adder@2"))


async def test_the_disk_tier_is_bounded_and_keeps_what_the_engine_holds(stage: Stage) -> None:
    manifests = [await stage.add(f"acme/adder@{n}") for n in (1, 2, 3)]
    async with running(stage.replica(capacity=1, disk_bytes=manifests[0].adapter_bytes * 2)) as replica:
        for number in (1, 2, 3):
            await tokens(replica, ask(f"acme/adder@{number}"))
        assert replica.files.on_disk() == [manifests[1].adapter_sha256, manifests[2].adapter_sha256]
