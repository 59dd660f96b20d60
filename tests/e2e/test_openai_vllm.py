"""The openai client's surface, and lm-eval, on vLLM and SmolLM2 in fp32, through a whole stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from cli.stack.bases import SMOLLM2_NAME
from tests.contract.engine_rig import smollm2
from tests.e2e.harness import by_lm_eval, by_transformers
from tests.e2e.openai_checks import CHECKS
from tests.e2e.openai_surface import Surface, trained_surface
from tests.stacks import StackProcess

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def surface(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surface]:
    stack = StackProcess(tmp_path_factory.mktemp("openai-vllm") / "data", "vllm", env={"MINT_SERVING_DTYPE": "float32"})
    try:
        with trained_surface(stack.up(), SMOLLM2_NAME) as found:
            yield found
    finally:
        stack.down()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_clients_surface_on_vllm(surface: Surface, check: Callable[[Surface], None]) -> None:
    check(surface)


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval")
def test_lm_eval_on_vllm_scores_what_the_models_own_files_score(surface: Surface, tmp_path: Path) -> None:
    base = smollm2()
    assert base is not None
    asked = by_lm_eval(surface.url, surface.base, base.directory, tmp_path)
    direct = by_transformers(base.directory)
    for through_gateway, from_files in zip(asked.choices, direct.choices, strict=True):
        assert [score for score, _ in through_gateway] == pytest.approx([score for score, _ in from_files], abs=1e-3)
        assert [greedy for _, greedy in through_gateway] == [greedy for _, greedy in from_files]
    assert asked.accuracy == direct.accuracy > 0.5
