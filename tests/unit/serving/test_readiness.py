"""registered → prewarming → ready: only with a proof, and the proof says what the engine read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.serving.errors import LoadFailed
from services.serving.readiness import NotProved, prove
from shared.adapters.manifest import Manifest, Probe
from shared.engine.port import Capabilities, LoadReport
from tests.adapters import write_adapter
from tests.serving_kit import Stage, ask, make_base, running, tokens, until


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, make_base(tmp_path / "base"))


@pytest.fixture
def manifest(stage: Stage, tmp_path: Path) -> Manifest:
    made = write_adapter(tmp_path / "adapter", stage.base, "acme/adder@1", rank=2)
    return made.model_copy(update={"probe": Probe(prompt=(1, 2, 3), logprobs=(-1.0, -2.0), dtype="float32")})


def _has(dtype: Any = "float32") -> Capabilities:
    return Capabilities("fake", "b", "0" * 64, dtype, 512, 32, 4, 4, frozenset())


def _report(manifest: Manifest) -> LoadReport:
    return LoadReport("acme/adder@1", 7, 7, manifest.adapter_sha256, True, (-1.0, -2.0), 0.1)


def test_a_true_report_is_a_proof(manifest: Manifest) -> None:
    proof = prove(manifest, _report(manifest), _has())
    assert proof.adapter_sha256 == manifest.adapter_sha256
    assert proof.probe_max_abs_diff == 0.0


def test_a_zero_delta_revision_is_proved_too(stage: Stage, tmp_path: Path) -> None:
    made = write_adapter(tmp_path / "zero", stage.base, "acme/adder@1", rank=2, std=0)
    assert made.zero_delta
    assert prove(made, replace(_report(made), probe_logprobs=()), _has()).probe_max_abs_diff is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"modules_applied": 0}, "0 of 7 modules applied"),
        ({"modules_applied": 6}, "6 of 7 modules applied"),
        ({"modules_applied": 0, "modules_expected": 0}, "0 of 0 modules"),
        ({"adapter_sha256": "a" * 64}, "the engine read adapter aaaa"),
        ({"tensors_equal": False}, "differ from the exported file"),
        ({"revision": "acme/adder@2"}, "loaded acme/adder@2"),
        ({"probe_logprobs": (-1.0, -2.01)}, "differ from the trainer's by 0.01"),
        ({"probe_logprobs": (-1.0, float("nan"))}, "not finite"),
        ({"probe_logprobs": (-1.0,)}, "has 1 logprobs, not 2"),
    ],
)
def test_a_broken_link_is_no_proof(manifest: Manifest, change: dict[str, Any], reason: str) -> None:
    """vllm#34186, vllm#48019, verl#7495."""
    with pytest.raises(NotProved, match=reason):
        prove(manifest, replace(_report(manifest), **change), _has())


@pytest.mark.parametrize(("engine", "trainer"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_in_bf16_the_probes_difference_is_recorded_and_not_judged(
    manifest: Manifest, engine: str, trainer: str
) -> None:
    probe = Probe(prompt=(1, 2, 3), logprobs=(-1.0, -2.0), dtype=trainer)
    report = replace(_report(manifest), probe_logprobs=(-1.25, -2.0))
    proof = prove(manifest.model_copy(update={"probe": probe}), report, _has(engine))
    assert proof.probe_max_abs_diff == 0.25


async def test_what_is_not_proved_is_never_ready_and_leaves_nothing_resident(stage: Stage) -> None:
    await stage.add("acme/adder@1")
    await stage.desire("acme/adder@1")
    stage.controls.distort = lambda report: replace(report, modules_applied=0)
    async with running(stage.replica()) as replica:
        with pytest.raises(LoadFailed, match="0 of 7 modules applied"):
            await tokens(replica, ask("acme/adder@1"))
        announced = replica.status.replica()
        assert announced is not None
        assert announced.ready == ()
        assert [failed.revision for failed in announced.failed] == ["acme/adder@1"]
        assert "0 of 7" in announced.failed[0].reason
        assert await stage.controls.engines[-1].resident() == []
    assert stage.bus.published == []


async def test_ready_is_published_once_per_boot_and_revision_with_its_proof(stage: Stage) -> None:
    manifest = await stage.add("acme/adder@1")
    await stage.add("acme/adder@2")
    await stage.desire("acme/adder@1")
    stage.bus.down = True
    async with running(stage.replica(capacity=1)) as replica:
        stage.bus.down = False
        await until(lambda: stage.bus.published)
        boot = replica.supervisor.boot_id
        await tokens(replica, ask("acme/adder@2"))
        await tokens(replica, ask("acme/adder@1"))
        await until(lambda: len(stage.bus.published) == 2)
        type_, id_, body = stage.bus.published[0]
    assert type_ == "mint.v1.revision.ready"
    assert id_ == f"{boot}:acme/adder@1"
    assert body["adapter_sha256"] == manifest.adapter_sha256
    assert (body["modules_applied"], body["modules_expected"], body["tensors_equal"]) == (7, 7, True)
    assert [entry[1] for entry in stage.bus.published] == [f"{boot}:acme/adder@1", f"{boot}:acme/adder@2"]


async def test_the_answer_names_what_the_engine_loaded(stage: Stage) -> None:
    manifest = await stage.add("acme/adder@1")
    async with running(stage.replica()) as replica:
        sampling = await replica.sampler.open(ask("acme/adder@1"))
        served = sampling.served
        await sampling.close()
        plain = await replica.sampler.open(ask())
        await plain.close()
    assert served.adapter_sha256 == manifest.adapter_sha256
    assert (served.revision, served.base_sha256) == ("acme/adder@1", stage.base.sha256)
    assert served.boot_id == replica.supervisor.boot_id
    assert (plain.served.revision, plain.served.adapter_sha256) == (None, None)


async def test_a_desired_adapter_that_is_not_the_catalogs_is_refused(stage: Stage) -> None:
    await stage.add("acme/adder@1")
    await stage.desire("acme/adder@1")
    await stage.add("acme/adder@1", seed=99)
    async with running(stage.replica()) as replica:
        assert "is wanted as adapter" in replica.residency.failures.given_up()["acme/adder@1"]
