"""lm-eval's `local-completions` on a local task, against a whole stack on the tiny base in fp32."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.harness import by_lm_eval, by_transformers, documents
from tests.stacks import StackProcess
from tests.tiny import TINY_NAME

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval"),
]


def test_lm_eval_scores_what_the_models_own_files_score(
    shared_stack: StackProcess, bases: Path, tmp_path: Path
) -> None:
    base = Path(json.loads(bases.read_text())["bases"][0]["directory"])
    asked, direct = by_lm_eval(shared_stack.url, TINY_NAME, base, tmp_path), by_transformers(base)
    assert len(asked.choices) == len(documents()) == 8
    for through_gateway, from_files in zip(asked.choices, direct.choices, strict=True):
        assert [score for score, _ in through_gateway] == pytest.approx([score for score, _ in from_files], abs=1e-3)
        assert [greedy for _, greedy in through_gateway] == [greedy for _, greedy in from_files]
    assert asked.accuracy == direct.accuracy
