"""vLLM without admission before it: what the read-back from its slots catches alone."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from shared.adapters import layout
from shared.adapters.admission import Admitted, Host
from shared.adapters.manifest import Manifest
from shared.engine.port import AdapterRefused
from tests.adapters import lora_tensors
from tests.contract.engine_rig import STRONG, Rig, close_to, make_rig, smollm2

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    base = smollm2()
    if base is None:
        pytest.skip("SmolLM2 is not converted; run make setup")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = await asyncio.to_thread(make_rig, "vllm", tmp_path_factory.mktemp("vllm"), base)
    yield made
    await made.engine.close()


@pytest.fixture(autouse=True)
def admit_everything(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def admit(manifest: Manifest, directory: Path, host: Host) -> Admitted:
        tensors = layout.read_headers(directory / layout.TENSOR_FILE)
        return Admitted(manifest.adapter_sha256, tensors, (), manifest.adapter_bytes)

    monkeypatch.setattr("shared.engine.vllm.engine.admit", admit)


async def test_keys_that_vllm_ignores_are_found_in_its_slots(rig: Rig) -> None:
    """vllm#34186, vllm#48019: vLLM takes the adapter, and generation is the base model's."""
    quiet = await rig.scores()
    tensors = {
        name.replace("model.layers", "model.language_model.layers"): value
        for name, value in lora_tensors(rig.base, 8, seed=0, std=STRONG).items()
    }
    with pytest.raises(AdapterRefused, match=r"0 of \d+ modules applied"):
        await rig.load("acme/p@1", tensors=tensors)
    assert await rig.engine.resident() == []
    assert close_to(await rig.scores(), quiet, 1e-4)


async def test_a_scaling_that_is_not_the_manifests_is_found_in_its_slots(rig: Rig) -> None:
    """vllm#6909: the config says alpha/r, the manifest alpha/√r."""
    plain = layout.config_bytes(rig.base.name, 16, 32.0, False, rig.base.target_modules)
    with pytest.raises(AdapterRefused, match="read back from the engine differ"):
        await rig.load("acme/p@1", rank=16, alpha=32.0, use_rslora=True, std=STRONG, config=plain)
    assert await rig.engine.resident() == []
