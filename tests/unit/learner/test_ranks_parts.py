"""The parts of a group that need no second process: who gets what, what is refused, what is told."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mint_schemas.commands import UpdateRequested
from torch import nn

from services.learner.follower import follow
from services.learner.group_bench import GroupBench
from services.learner.leader import LeadBench, Leader
from services.learner.one_step import StepOutcome, StepRequest, reference_key, shape_of
from services.learner.peers import Group, OutOfStep
from services.learner.ranks import Held, Leave, Open, Order, Steps, join
from services.learner.recipe import StepRows
from services.learner.sharding import shard
from services.learner.trainer import TorchTrainer
from shared.errors import Fatal
from shared.text.codec import TextCodec
from tests.tiny import TINY_NAME
from tests.unit.learner import job_scenes, scenes
from tests.unit.learner.conftest import Rig


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (4, 2, [[(0, True), (2, True)], [(1, True), (3, True)]]),
        (3, 2, [[(0, True), (2, True)], [(1, True), (2, False)]]),
        (1, 3, [[(0, True)], [(0, False)], [(0, False)]]),
        (0, 2, [[], []]),
    ],
)
def test_items_are_dealt_in_rounds_that_all_take_part_in(
    count: int, size: int, expected: list[list[tuple[int, bool]]]
) -> None:
    found = []
    for rank in range(size):
        group = object.__new__(Group)
        group.rank, group.size = rank, size
        found.append(group.share(list(range(count))))
    assert found == expected


class _Layer(nn.Module):
    def __init__(self, **linears: nn.Linear) -> None:
        super().__init__()
        for name, linear in linears.items():
            setattr(self, name, linear)


def test_a_base_whose_targets_begin_at_different_depths_is_refused() -> None:
    """A later layer's gradient does not pass through the earlier ones, whose weights would not be gathered."""
    module = nn.Sequential(_Layer(q_proj=nn.Linear(2, 2)), _Layer(q_proj=nn.Linear(2, 2), gate=nn.Linear(2, 2)))
    module._no_split_modules = ["_Layer"]
    with pytest.raises(Fatal, match=r"adapter target differ: \{'q_proj': 0, 'gate': 1\}"):
        shard(module, None, ["q_proj", "gate", "absent"])  # type: ignore[arg-type]


def test_one_process_is_no_group_and_a_device_is_named_without_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join("cuda:1") is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join("cpu") is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Fatal, match="MINT_LEARNER_DEVICE is 'cuda:1'; over 2 processes it is cpu or cuda"):
        join("cuda:1")


class _Ended(Exception):
    pass


def _end(reason: str) -> Any:
    raise _Ended(reason)


def _leader(hear: Callable[[Any], Any]) -> Leader:
    peers = SimpleNamespace(hear=hear, agree=lambda about, value: None)
    return Leader(SimpleNamespace(peers=peers, heartbeat=SimpleNamespace(stop=lambda: None)), _end)  # type: ignore[arg-type]


def test_an_order_that_fails_ends_the_leader_and_one_that_cannot_be_told_is_not_given() -> None:
    told: list[bytes] = []
    leader = _leader(told.append)
    with pytest.raises(Exception, match="pickle"):
        leader.lead(Steps(TINY_NAME, [lambda: None], []), lambda: None)  # type: ignore[list-item]
    assert told == []
    with pytest.raises(_Ended, match="cannot go on: out of memory"):
        leader.lead(Leave(), lambda: _end("out of memory"))
    assert len(told) == 1
    leader.close(1.0)
    leader.close(1.0)
    assert len(told) == 2


def _bench(rig: Callable[..., Rig], tiny_directory: Path, cls: Any, **arguments: Any) -> tuple[Any, Rig]:
    made = rig()
    parts = job_scenes.tiny_base(tiny_directory), made.base, made.slots, TorchTrainer(made.base, 4096)
    return cls(*parts, TextCodec.load(tiny_directory), **arguments), made


def _request() -> StepRequest:
    command = UpdateRequested(
        command_id="run:update:1", run_id="run", policy="acme/a", base=TINY_NAME, step=1, steps=4,
        method=job_scenes.SFT, lora=job_scenes.LORA_A, seed=7, start=None, fresh_optimizer=True, export=False,
    )  # fmt: skip
    return StepRequest(command, None, None, None, StepRows([], scenes.CROSS_ENTROPY, {}), scenes.go_on)


def test_what_a_turn_was_told_of_a_slot_stays_true_until_the_turn_has_taken_it(
    rig: Callable[..., Rig], tiny_directory: Path
) -> None:
    request = _request()
    seen: list[str | None] = []
    orders: list[Any] = []

    def lead(order: Order, part: Callable[[], Any]) -> Any:
        orders.append(order)
        bench.keep(StepOutcome({}, True, False, {}, slot, slot.turn), "later")
        bench.keep(StepOutcome({}, True, False, {}, other, other.turn), "another's")
        seen.append(slot.holds)
        return part()

    leader = SimpleNamespace(ranks=SimpleNamespace(peers=SimpleNamespace(agree=lambda about, value: None)), lead=lead)
    bench, made = _bench(rig, tiny_directory, LeadBench, leader=leader)
    slot, other = made.fresh("acme/a", shape=shape_of(request.command)), made.fresh("acme/b")
    slot.holds = "before"
    (outcome,) = bench.steps([request])
    assert isinstance(outcome, StepOutcome)
    assert orders[0].held == [Held("acme/a", shape_of(request.command), "before")]
    assert seen == ["before"]
    assert other.holds == "another's"
    bench.keep(outcome, "after")
    assert slot.holds == "after"


def test_a_slot_that_only_the_leader_has_is_out_of_step(rig: Callable[..., Rig], tiny_directory: Path) -> None:
    bench, _ = _bench(rig, tiny_directory, GroupBench, peers=SimpleNamespace())
    held = Held(reference_key(_request().command), shape_of(_request().command), "x")
    with pytest.raises(OutOfStep, match="the leader has a slot of acme/a"):
        bench.take_turn([_request()], [held])


def test_a_follower_refuses_a_base_whose_files_differ(tiny_directory: Path) -> None:
    base = dataclasses.replace(job_scenes.tiny_base(tiny_directory), sha256="f" * 64)
    peers = SimpleNamespace(hear=lambda value: pickle.dumps(Open(base, job_scenes.SETTINGS)))
    with pytest.raises(Fatal, match="here, the leader's is ffffffffffff"):
        follow(SimpleNamespace(peers=peers), lambda order, ranks: pytest.fail("opened"))  # type: ignore[arg-type]
