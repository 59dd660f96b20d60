"""What must not stay behind: entries of dead engines, unproved adapters, blame, names of events, stalled readers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.serving import announce, status
from services.serving.announce import ReadyEvents
from services.serving.errors import LoadFailed
from services.serving.eviction import Lru
from services.serving.failures import KEPT, Failures
from services.serving.memory import MemoryTier, Resident
from services.serving.routes import _SampleResponse
from services.serving.sampling import Sampling
from shared.engine.port import LoadReport, SampleChunk
from shared.sampling.port import Served
from tests.serving_kit import Stage, ask, make_base, running, tokens


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, make_base(tmp_path / "base"))


class SlowEngine:
    """An unload waits for `gate`, then fails."""

    def __init__(self) -> None:
        self.begun, self.gate = asyncio.Event(), asyncio.Event()

    async def unload(self, revision: str) -> None:
        self.begun.set()
        await self.gate.wait()
        raise RuntimeError(f"{revision} cannot be removed")


def _entry(revision: str, engine: Any = None) -> Resident:
    loaded: Any = SimpleNamespace(
        proof=SimpleNamespace(revision=revision, adapter_sha256=revision),
        manifest=SimpleNamespace(adapter_bytes=1),
        engine=engine,
    )
    return Resident(loaded, "disk")


async def test_a_failed_unload_brings_no_entry_of_a_dead_engine_back() -> None:
    memory, engine = MemoryTier(1, 100, Lru(), room_wait_s=60.0), SlowEngine()
    memory.add(_entry("acme/a@1", engine))

    async def load() -> None:
        async with memory.room("acme/b@1", 1):
            memory.add(_entry("acme/b@1"))

    loading = asyncio.create_task(load())
    await engine.begun.wait()
    memory.clear()
    engine.gate.set()
    await loading
    assert [entry.revision for entry in memory.entries()] == ["acme/b@1"]


async def test_the_end_of_a_request_is_no_news_for_the_announcement() -> None:
    memory = MemoryTier(2, 100, Lru(), room_wait_s=60.0)
    memory.add(_entry("acme/a@1"))
    memory.changed.clear()
    held = memory.hold("acme/a@1")
    assert held is not None
    memory.let_go(held)
    assert not memory.changed.is_set()


async def test_what_was_not_proved_leaves_the_engine_before_its_next_load_if_it_does_not_at_once(stage: Stage) -> None:
    await stage.add("acme/bad@1")
    await stage.add("acme/good@1")

    def distort(report: LoadReport) -> LoadReport:
        return replace(report, modules_applied=0) if report.revision == "acme/bad@1" else report

    stage.controls.distort = distort
    async with running(stage.replica()) as replica:
        engine = stage.controls.engines[-1]
        unload = engine.unload

        async def refused(revision: str) -> None:
            raise RuntimeError(f"Call to remove_lora({revision}) failed")

        engine.unload = refused  # type: ignore[method-assign]
        with pytest.raises(LoadFailed, match="0 of 7 modules applied"):
            await tokens(replica, ask("acme/bad@1"))
        assert [adapter.revision for adapter in await engine.resident()] == ["acme/bad@1"]
        engine.unload = unload  # type: ignore[method-assign]
        assert await tokens(replica, ask("acme/good@1"))
        assert [adapter.revision for adapter in await engine.resident()] == ["acme/good@1"]
    assert stage.controls.loads["acme/bad@1"] == 1


def test_the_blame_for_a_dead_engine_stands_10_minutes_and_is_kept_for_few() -> None:
    now = 100.0
    failures = Failures(lambda: now)
    for _ in range(2):
        failures.killed("acme/a@1", RuntimeError("gone"))
    now += 599.0
    assert failures.refused("acme/a@1")
    now += 1.0
    assert not failures.refused("acme/a@1")
    for number in range(2 * KEPT):
        failures.killed(f"acme/b@{number}", RuntimeError("gone"))
    assert len(failures._kills) == KEPT


def test_the_revisions_told_of_are_bounded_and_forgotten_with_the_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "REMEMBERED", 3)
    supervisor: Any = SimpleNamespace(boot_id="boot-1")
    identity: Any = SimpleNamespace(name="mini-0", base=SimpleNamespace(name="mini/llama", token="mini"))
    bus: Any = None
    events = ReadyEvents(bus, identity, supervisor)

    def told(number: int) -> int:
        """How many events it makes that the revision is ready."""
        before = events._waiting.qsize()
        proof = SimpleNamespace(
            revision=f"acme/a@{number}",
            adapter_sha256="0" * 64,
            modules_applied=7,
            modules_expected=7,
            probe_max_abs_diff=None,
            seconds=0.1,
        )
        loaded: Any = SimpleNamespace(proof=proof)
        events.ready(loaded)
        return events._waiting.qsize() - before

    assert [told(number) for number in (1, 2, 3, 1, 4, 1, 2)] == [1, 1, 1, 0, 1, 0, 1]
    for number in range(5, 50):
        told(number)
    assert len(events._told) == 3
    supervisor.boot_id = "boot-2"
    assert [told(49), told(49)] == [1, 0]
    assert len(events._told) == 1


class Reader:
    """Whoever reads a sample: takes `takes` messages, then nothing until `gate`."""

    def __init__(self, takes: int) -> None:
        self.left, self.gate = takes, asyncio.Event()

    async def send(self, message: Any) -> None:
        if not self.left:
            await self.gate.wait()
        self.left -= 1

    async def receive(self) -> Any:
        await self.gate.wait()


def _sampling(closed: list[str]) -> Sampling:
    async def chunks() -> Any:
        for token in range(1000):
            yield SampleChunk(0, (token,), (0.0,), None, None)

    async def close() -> None:
        closed.append("closed")

    closing = AsyncExitStack()
    closing.push_async_callback(close)
    return Sampling(Served("b", "0" * 64, None, None, "r", "boot", "fake"), chunks(), closing)


async def test_a_reader_that_takes_nothing_any_more_gives_its_turn_and_its_hold_back() -> None:
    reader, closed = Reader(takes=5), list[str]()
    response = _SampleResponse(_sampling(closed), write_wait_s=0.01)
    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    await response(scope, reader.receive, reader.send)
    assert (closed, reader.left) == (["closed"], 0)


async def test_a_stream_that_cannot_be_closed_gives_its_turn_and_its_hold_back() -> None:
    closed = list[str]()
    response = _SampleResponse(_sampling(closed))
    lines = response._lines
    await anext(lines)

    async def broken() -> None:
        raise RuntimeError("asynchronous generator is already running")

    response._lines = SimpleNamespace(aclose=broken)
    response.body_iterator = lines
    scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
    reader = Reader(takes=5000)
    with pytest.raises(RuntimeError, match="already running"):
        await response(scope, reader.receive, reader.send)
    assert closed == ["closed"]


async def test_the_report_names_the_latest_on_disk_and_counts_all(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "REPORTED_ON_DISK", 2)
    digests = [(await stage.add(f"acme/a@{number}")).adapter_sha256 for number in (1, 2, 3)]
    async with running(stage.replica()) as replica:
        for number in (1, 2, 3):
            await tokens(replica, ask(f"acme/a@{number}"))
        report = await replica.status.report()
    assert (report["disk"], report["disk_count"]) == (digests[1:], 3)
