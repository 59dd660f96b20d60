"""What need not be kept: brought near while there is room, in nobody's way when there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mint_schemas.common import FileRef

from services.serving.wanted import Wanted
from shared.adapters.manifest import Manifest
from shared.residency import Desired, DesiredRevision
from tests.serving_kit import Stage, ask, make_base, running, tokens, until


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, make_base(tmp_path / "base"))


async def test_what_need_not_be_kept_is_loaded_before_the_replica_is_healthy_while_a_place_is_left(
    stage: Stage,
) -> None:
    names = [f"acme/p{number}@1" for number in range(6)]
    for name in names:
        await stage.add(name)
    await stage.desire(*names, lately=tuple(names[1:]))
    async with running(stage.replica(capacity=4)) as replica:
        assert sorted(entry.revision for entry in replica.residency.residents()) == names[:3]
        assert stage.controls.loads == dict.fromkeys(names[:3], 1)


async def test_traffic_pushes_it_out_and_it_does_not_come_back_for_being_wanted(stage: Stage) -> None:
    names = [f"acme/p{number}@1" for number in range(3)]
    hot = [f"acme/hot{number}@1" for number in range(4)]
    for name in (*names, *hot):
        await stage.add(name)
    await stage.desire(*names, lately=tuple(names))
    async with running(stage.replica(capacity=4)) as replica:
        for name in hot:
            await tokens(replica, ask(name))
        assert sorted(entry.revision for entry in replica.residency.residents()) == sorted(hot)
        await stage.desire(*reversed(names), lately=tuple(names))
        await until(lambda: replica.residency._wanted.if_there_is_room == tuple(reversed(names)))
        assert replica.residency.missing() == []
        assert stage.controls.loads == dict.fromkeys((*names, *hot), 1)


async def test_what_is_to_be_kept_comes_back_and_a_pinned_one_never_leaves(stage: Stage) -> None:
    hot = [f"acme/hot{number}@1" for number in range(4)]
    for name in ("acme/pinned@1", *hot):
        await stage.add(name)
    await stage.desire("acme/pinned@1", pinned=("acme/pinned@1",))
    async with running(stage.replica(capacity=3)) as replica:
        for name in hot:
            await tokens(replica, ask(name))
        assert stage.controls.loads == dict.fromkeys(("acme/pinned@1", *hot), 1)
        assert "acme/pinned@1" in [entry.revision for entry in replica.residency.residents()]


def _wanted(sizes: dict[str, int], max_bytes: int = 2**30, capacity: int = 4) -> Wanted:
    """r<n> is what a run needs, m<n> what an alias move waits for."""
    wanted = Wanted(capacity, max_bytes)
    entries = [DesiredRevision(revision=name, adapter_sha256=name, priority=int(name[0] == "m")) for name in sizes]
    wanted.take(Desired(base="b", entries=tuple(entries)))
    for name, size in sizes.items():
        named: Any = {"revision": name, "files": {"tensors": FileRef(key="k", size=size, sha256="0" * 64)}}
        wanted.learn(Manifest.model_construct(None, **named))
    return wanted


def test_runs_leave_one_place_to_the_first_alias_move() -> None:
    runs = [f"r{number}" for number in range(6)]
    assert _wanted(dict.fromkeys([*runs, "m0", "m1"], 1)).revisions() == ["r0", "r1", "r2", "m0"]
    assert _wanted(dict.fromkeys(runs, 1)).revisions() == ["r0", "r1", "r2", "r3"]
    assert _wanted(dict.fromkeys(["r0", "m0", "r1", "m1"], 1)).revisions() == ["r0", "r1", "m0", "m1"]
    assert _wanted(dict.fromkeys(["r0", "m0"], 1), capacity=1).revisions() == ["r0"]


def test_runs_leave_the_first_alias_move_its_bytes() -> None:
    assert _wanted({"r0": 4, "r1": 4, "m0": 3, "m1": 1}, max_bytes=10).revisions() == ["r0", "m0"]
    assert _wanted({"r0": 4, "r1": 4, "m0": 11}, max_bytes=10).revisions() == ["r0", "r1"]
