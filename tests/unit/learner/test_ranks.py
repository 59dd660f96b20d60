"""One base over two processes: the same steps, checkpoints and errors as in one, fp32 on the tiny base."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

from services.learner.app import make_bench
from services.learner.batch import Share, plan_batches
from services.learner.trainer import ForwardBackward
from tests.tiny import make_tiny_base
from tests.unit.learner import job_scenes, rank_process, scenes

LOSS = 1e-6
GRADIENT = 1e-5


class Found(NamedTuple):
    """What one process computed, and what each of two did."""

    alone: dict[str, Any]
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    make_tiny_base(made / "base")
    return made


@pytest.fixture(scope="module")
def primitives(directory: Path) -> Found:
    rig = scenes.Rig.of(directory / "base")
    torch.save(scenes.training(rig, None, [1, 2])["files"], directory / "others.pt")
    group = rank_process.start("primitives", directory)
    assert rank_process.codes(group) == [0, 0]
    ranks = rank_process.results(directory)
    return Found(scenes.everything(rig, ranks[0]["half"]["files"]), ranks)


@pytest.fixture(scope="module")
def jobs(directory: Path) -> Found:
    group = rank_process.start("jobs", directory)
    alone = asyncio.run(job_scenes.jobs(make_bench(job_scenes.tiny_base(directory / "base"), job_scenes.SETTINGS)))
    assert rank_process.codes(group) == [0, 0]
    return Found(alone, rank_process.results(directory))


def _relative_l2(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


@pytest.mark.parametrize("shape", ["large", "small"])
@pytest.mark.parametrize(("max_tokens", "passes"), [(4096, 1), (35, 3), (1, 5)])
def test_two_processes_compute_the_loss_and_gradients_of_one(
    primitives: Found, shape: str, max_tokens: int, passes: int
) -> None:
    """Losses to 1e-6, gradients to 1e-5 relative L2; odd numbers of passes, and fewer than processes; an
    adapter of the largest shape, and one of smaller rank and fewer targets."""
    key = f"{shape} {max_tokens}"
    expected, expected_gradients = primitives.alone["gradients"][key]
    assert expected.loss > 1.0
    for rank in primitives.ranks:
        found, gradients = rank["gradients"][key]
        assert isinstance(found, ForwardBackward)
        assert abs(found.loss - expected.loss) <= LOSS
        assert found.tokens == expected.tokens
        for row, expected_row in zip(found.logprobs, expected.logprobs, strict=True):
            assert row == pytest.approx(expected_row, abs=1e-4)
        assert gradients.keys() == expected_gradients.keys()
        assert _relative_l2(_flat(gradients), _flat(expected_gradients)) <= GRADIENT
    here, there = (rank["gradients"][key][1] for rank in primitives.ranks)
    assert all(torch.equal(here[name], there[name]) for name in here)
    batches = plan_batches([Share(scenes.rows(5), None)], max_tokens, padded=False)
    assert len(batches) == passes


def test_forward_passes_are_merged_with_and_without_adapter(primitives: Found) -> None:
    for rank in primitives.ranks:
        for found, expected in zip(rank["forward"], primitives.alone["forward"], strict=True):
            assert [len(row) for row in found] == [len(row) for row in expected]
            for row, expected_row in zip(found, expected, strict=True):
                assert row == pytest.approx(expected_row, abs=1e-4)


def test_the_reverse_kl_is_that_of_one_process(primitives: Found) -> None:
    """Its reference is a forward pass between the student's forward and backward."""
    expected, expected_gradients = primitives.alone["reverse_kl"]
    for rank in primitives.ranks:
        found, gradients = rank["reverse_kl"]
        assert abs(found.loss - expected.loss) <= LOSS
        assert found.losses == pytest.approx(expected.losses, abs=LOSS)
        assert _relative_l2(gradients, expected_gradients) <= GRADIENT


def test_the_base_is_shared_out_and_no_byte_of_it_changes(primitives: Found) -> None:
    before, after = primitives.alone["digests"]
    assert before == after
    assert [rank["digests"] for rank in primitives.ranks] == [(before, before)] * 2
    for rank in primitives.ranks:
        assert rank["shares"]
        assert all(2 * own == all_of_it for own, all_of_it in rank["shares"].values())


def test_steps_leave_the_same_bytes_in_every_process(primitives: Found) -> None:
    """Parameters, moments and all else of a checkpoint; also after errors in between."""
    here, there = primitives.ranks
    for what in ("whole", "half", "continued", "rewritten", "after"):
        assert here[what]["files"] == there[what]["files"]
    assert here["whole"]["files"] == here["after"]["files"]
    assert torch.equal(here["one_bad_row"]["b"], there["one_bad_row"]["b"])


def test_a_run_stays_within_the_bounds_of_one_process(primitives: Found) -> None:
    _near(primitives.ranks[0]["whole"], primitives.alone["whole"])


def test_a_checkpoint_of_one_process_is_continued_by_two(primitives: Found) -> None:
    """Restored and written again it is the same bytes; continued it is where one process comes to."""
    two = primitives.ranks[0]
    assert two["rewritten"]["files"] == primitives.alone["half"]["files"]
    _near(two["continued"], _second_half(primitives.alone["whole"]))


def test_a_checkpoint_of_two_processes_is_continued_by_one(primitives: Found) -> None:
    two = primitives.ranks[0]
    assert primitives.alone["rewritten"]["files"] == two["half"]["files"]
    _near(primitives.alone["continued"], _second_half(two["whole"]))


def _second_half(training: dict[str, Any]) -> dict[str, Any]:
    return training | {"losses": training["losses"][2:], "gradients": training["gradients"][2:]}


def _near(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(found["losses"]) == len(expected["losses"]) > 0
    for loss, expected_loss in zip(found["losses"], expected["losses"], strict=True):
        assert abs(loss - expected_loss) <= LOSS
    for gradient, expected_gradient in zip(found["gradients"], expected["gradients"], strict=True):
        assert _relative_l2(gradient, expected_gradient) <= GRADIENT
    adapters = [load_tensors(it["files"]["adapter.safetensors"]) for it in (found, expected)]
    assert adapters[0].keys() == adapters[1].keys()
    assert max(float((adapters[0][name] - adapters[1][name]).abs().max()) for name in adapters[0]) <= 1e-5
    assert found["files"]["state.json"] == expected["files"]["state.json"]


def test_a_bad_row_of_the_second_process_fails_its_policy_everywhere_and_no_other(primitives: Found) -> None:
    expected = primitives.alone["one_bad_row"]
    for rank in primitives.ranks:
        found = rank["one_bad_row"]
        assert str(found["error"]) == "row row1: its loss is -inf; no step was made"
        assert found["a"] is None
        assert abs(found["loss"] - expected["loss"]) <= LOSS
        assert found["norm"] == pytest.approx(expected["norm"], rel=GRADIENT)
        assert float((found["b"] - expected["b"]).abs().max()) <= 1e-5


def test_a_check_that_raises_in_the_first_process_ends_the_call_in_all(primitives: Found) -> None:
    ended = ["the lease is lost", "0 accumulated"] * 2
    assert primitives.alone["check"] == ended
    assert [rank["check"] for rank in primitives.ranks] == [ended, ended]


def test_policies_train_under_a_leader_as_they_do_in_one_process(jobs: Found) -> None:
    """SFT of two shapes side by side, a lease that is lost and taken again, GRPO with a reference adapter
    and two steps a record."""
    leader, follower = jobs.ranks
    assert leader["lost"] == jobs.alone["lost"] == "lease lost"
    assert follower == {}
    assert leader["metrics"].keys() == jobs.alone["metrics"].keys()
    for name, expected in jobs.alone["metrics"].items():
        assert leader["metrics"][name]["loss"] == pytest.approx(expected["loss"], rel=LOSS, abs=LOSS)
        assert leader["metrics"][name]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=GRADIENT)
        for tensor, value in jobs.alone["adapters"][name].items():
            assert float((leader["adapters"][name][tensor] - value).abs().max()) <= 1e-5


def test_one_process_writes_each_checkpoint_once(jobs: Found) -> None:
    written = jobs.ranks[0]["puts"]
    assert sorted(written) == sorted(jobs.alone["puts"])
    assert len(set(written)) == len(written)
    adapters = [key for key in written if key.endswith("adapter.safetensors")]
    assert len(adapters) == 7


@pytest.mark.parametrize(("scene", "size", "killed"), [("idle", 3, 2), ("idle", 2, 0), ("busy", 2, 1), ("busy", 2, 0)])
def test_a_killed_process_ends_the_others(directory: Path, tmp_path: Path, scene: str, size: int, killed: int) -> None:
    (tmp_path / "base").symlink_to(directory / "base")
    group = rank_process.start(scene, tmp_path, size)
    rank_process.wait_for([tmp_path / f"ready{rank}" for rank in range(size)])
    group[killed].kill()
    assert rank_process.codes(group) == [-9 if rank == killed else 1 for rank in range(size)]


def test_processes_that_differ_after_a_turn_end_all(directory: Path) -> None:
    assert rank_process.codes(rank_process.start("drift", directory)) == [1, 1]


def test_what_they_must_agree_on_is_named(directory: Path, tmp_path: Path) -> None:
    assert rank_process.codes(rank_process.start("differ", tmp_path)) == [0, 0]
    for found in rank_process.results(tmp_path):
        assert found["error"] == "the processes of this base differ in their rank: ['0', '1']"
