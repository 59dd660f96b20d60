"""What every engine refuses before it is asked, and what a load must have proved."""

from __future__ import annotations

import importlib.util
import math
import warnings
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from shared.adapters.manifest import Manifest, Probe
from shared.engine.port import AdapterRefused, Capabilities, LoadReport, SampleRequest, SamplingSettings
from shared.engine.proof import check_report
from shared.engine.requests import check_request

HAS = Capabilities("fake", "base", "b" * 64, "float32", 16, 8, 1, 1, frozenset({"q_proj"}))


def _check(**settings: Any) -> None:
    check_request(SampleRequest("r", (1,), SamplingSettings(max_tokens=1, **settings)), HAS, 10)


@pytest.mark.parametrize("temperature", [1e-46, 1e-6, 9.9e-6])
def test_a_temperature_that_leaves_no_distribution_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature is .* 0 \(greedy\) or at least 1e-05"):
        _check(temperature=temperature)


@pytest.mark.parametrize("top_k", [2**31, 10**30])
def test_a_top_k_that_no_engine_can_hold_is_refused(top_k: int) -> None:
    with pytest.raises(ValueError, match=r"top_k is .* within 1 to 2147483647"):
        _check(top_k=top_k)


def test_what_is_at_the_bounds_passes() -> None:
    _check(temperature=1e-5, top_k=2**31 - 1)
    _check(temperature=0.0)


def _manifest(probe: Probe) -> Manifest:
    digests = dict.fromkeys(("base_sha256", "tokenizer_sha256", "chat_template_sha256", "adapter_sha256"), "0" * 64)
    return Manifest(
        revision="acme/p@1",
        policy="acme/p",
        base="base",
        rank=8,
        alpha=16.0,
        use_rslora=False,
        target_modules=("q_proj",),
        tensors=(),
        files={},
        parent=None,
        run_id="run",
        step=1,
        zero_delta=False,
        probe=probe,
        **digests,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_probe_that_is_not_finite_is_refused_in_every_dtype(
    dtype: Literal["float32", "bfloat16"], value: float
) -> None:
    report = LoadReport("acme/p@1", 1, 1, "0" * 64, True, (-1.0, value), 0.0)
    with pytest.raises(AdapterRefused, match="not finite"):
        check_report(report, _manifest(Probe(prompt=(1, 2, 3), logprobs=(-1.0, -2.0), dtype=dtype)), dtype)


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("prompt", [(), (10,), (-1,), (1,) * 16], ids=["empty", "beyond", "below", "long"])
async def test_a_probe_that_vllm_would_refuse_is_the_adapters_fault(prompt: tuple[int, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from shared.engine.vllm.engine import VllmEngine
    engine: Any = SimpleNamespace(_has=HAS, _vocab_size=10)
    manifest = _manifest(Probe(prompt=prompt, logprobs=(-1.0,), dtype="float32"))
    with pytest.raises(AdapterRefused, match="its probe cannot be asked"):
        await VllmEngine._probe(engine, manifest, None)
