"""Operations under a leader of two processes: what one process computes, within rounding."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.learner.app import make_bench
from tests.tiny import make_tiny_base
from tests.unit.learner import job_scenes, operation_scene, rank_process


def test_operations_under_a_leader_are_those_of_one_process(tmp_path: Path) -> None:
    make_tiny_base(tmp_path / "base")
    group = rank_process.start("operations", tmp_path)
    bench = make_bench(job_scenes.tiny_base(tmp_path / "base"), job_scenes.SETTINGS)
    alone = asyncio.run(operation_scene.operations(bench))
    assert rank_process.codes(group) == [0, 0]
    leader, follower = rank_process.results(tmp_path)
    assert follower == {}
    assert leader["failures"] == alone["failures"]
    assert len(alone["failures"]) == 2
    assert leader["losses"] == pytest.approx(alone["losses"], rel=1e-5, abs=1e-5)
    assert leader["probe"] == pytest.approx(alone["probe"], abs=1e-4)
    for policy, tensors in alone["adapters"].items():
        assert tensors.keys() == leader["adapters"][policy].keys()
        for name, tensor in tensors.items():
            assert float((leader["adapters"][policy][name] - tensor).abs().max()) <= 1e-5
