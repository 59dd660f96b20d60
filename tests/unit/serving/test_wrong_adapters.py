"""Adapters that are whole and are not what the base can apply: refused with the reason, never ready."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from services.serving.errors import LoadFailed
from shared.adapters.manifest import Manifest
from tests.adapters import lora_tensors, write_adapter
from tests.serving_kit import Stage, ask, make_base, running, tokens


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, make_base(tmp_path / "base"))


async def _add_renamed(stage: Stage, revision: str, old: str, new: str) -> Manifest:
    """Stored, registered and with true digests; only the tensors' names are another model's."""
    tensors = {name.replace(old, new): value for name, value in lora_tensors(stage.base, 2, seed=1, std=2.0).items()}
    source = stage.directory / "made" / revision.replace("/", "-")
    manifest = write_adapter(source, stage.base, revision, rank=2, tensors=tensors)
    for name, ref in manifest.files.items():
        await stage.store.put(ref.key, source / name)
    stage.catalog.add(manifest)
    return manifest


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("model.layers", "model.language_model.layers", "0 of 7 modules applied"),
        ("base_model.model.", "base_model.model._orig_mod.", "compiled module"),
        ("layers.0.mlp.up_proj", "layers.9.mlp.up_proj", "6 of 7 modules applied"),
    ],
)
async def test_an_adapter_of_other_names_is_never_ready(stage: Stage, old: str, new: str, reason: str) -> None:
    """vllm#34186, vllm#48019, Soup#335: it loads with 200 elsewhere, and behaves like the base."""
    await _add_renamed(stage, "acme/adder@1", old, new)
    await stage.desire("acme/adder@1")
    async with running(stage.replica()) as replica:
        plain = await tokens(replica, ask())
        started = time.monotonic()
        with pytest.raises(LoadFailed, match=reason) as refused:
            await tokens(replica, ask("acme/adder@1"))
        assert time.monotonic() - started < 1.0
        assert refused.value.status == 409
        announced = replica.status.replica()
        assert announced is not None
        assert announced.ready == ()
        assert [reason in failed.reason for failed in announced.failed] == [True]
        assert await stage.controls.engines[-1].resident() == []
        assert await tokens(replica, ask()) == plain
    assert stage.controls.loads["acme/adder@1"] == 1
    assert stage.bus.published == []
