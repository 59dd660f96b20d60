"""What need not be kept: brought near while there is room, in nobody's way when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

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
