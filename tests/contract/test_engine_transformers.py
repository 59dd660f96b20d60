"""The Transformers engine alone: failed batches, and equality with PEFT's own forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from shared.bases import load_base
from shared.engine.loop import LoopEngine
from shared.engine.port import EngineError, SampleRequest, SamplingSettings
from shared.engine.transformers.model import TransformersModel
from shared.store.memory import MemoryStore
from tests.contract.engine_rig import PROMPT, STRONG, Rig, close_to, make_rig, peft_greedy
from tests.tiny import TINY_NAME, TINY_TOKEN, make_tiny_base


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = make_rig("transformers", tmp_path)
    yield made
    await made.engine.close()


def _model(rig: Rig) -> TransformersModel:
    assert isinstance(rig.engine, LoopEngine)
    model = rig.engine._model
    assert isinstance(model, TransformersModel)
    return model


async def test_a_failed_batch_leaves_no_adapter_behind(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT keeps its mixed-adapter hooks after an exception; the next forward then runs on them."""
    await rig.load("acme/p@1", seed=1, std=STRONG)
    await rig.load("acme/q@1", seed=2, std=STRONG)
    base, other = await rig.scores(), await rig.scores("acme/q@1")
    model = _model(rig)
    with monkeypatch.context() as patch:

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("out of memory")

        patch.setattr(model._model.lm_head, "forward", fail)
        with pytest.raises(EngineError, match="out of memory"):
            await rig.ask("acme/p@1")
    assert not any(layer._forward_pre_hooks for layer in model._layers.values())
    assert close_to(await rig.scores("acme/q@1"), other, 1e-5)
    assert close_to(await rig.scores(), base, 1e-5)
    assert all(adapter.in_flight == 0 for adapter in await rig.engine.resident())


async def test_it_equals_peft(rig: Rig) -> None:
    manifest, where = rig.write("acme/p@1", std=STRONG, rank=4, use_rslora=True)
    await rig.engine.load(manifest, where)
    scores = await rig.scores("acme/p@1")
    plain = AutoModelForCausalLM.from_pretrained(rig.base.directory, dtype=torch.float32)
    peft = PeftModel.from_pretrained(plain, where).eval()
    with torch.no_grad():
        logprobs = peft(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert close_to(scores, [float(logprobs[i, token]) for i, token in enumerate(PROMPT[1:])], 1e-4)


async def test_a_downloaded_adapter_gives_plain_peft_the_same_greedy_tokens(tmp_path: Path) -> None:
    """Through the store's files of a revision; fp32."""
    base = load_base(TINY_NAME, TINY_TOKEN, make_tiny_base(tmp_path / "sharp", sharpness=20.0))
    rig = make_rig("transformers", tmp_path, base)
    try:
        store = MemoryStore()
        manifest, where = rig.write("acme/adder@1", rank=8, std=STRONG)
        for name, ref in manifest.files.items():
            await store.put(ref.key, where / name)
        fetched = tmp_path / "fetched"
        fetched.mkdir()
        for name, ref in manifest.files.items():
            await store.fetch(ref, fetched / name)
        await rig.engine.load(manifest, fetched)
        prompts = [(*PROMPT[:5], 216 + i, *PROMPT[6:]) for i in range(12)]
        ours = [a[0].tokens for a in await asyncio.gather(*(rig.ask("acme/adder@1", prompt=p) for p in prompts))]
        assert ours == await asyncio.to_thread(peft_greedy, base, fetched, prompts, 8)
        assert ours != [a[0].tokens for a in await asyncio.gather(*(rig.ask(prompt=p) for p in prompts))]
    finally:
        await rig.engine.close()


async def test_many_changes_leave_the_base_as_it_was(rig: Rig) -> None:
    """NeMo-RL#3696: a base that is merged into drifts. Loads never touch its tensors."""
    model = _model(rig)
    weights = {n: p.clone() for n, p in model._model.named_parameters() if "lora_" not in n}
    manifest, where = rig.write("acme/p@1", std=STRONG, rank=1)
    for _ in range(50):
        await rig.engine.load(manifest, where)
        await rig.ask("acme/p@1", max_tokens=1)
        await rig.engine.unload("acme/p@1")
    for name, value in model._model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(value, weights[name]), name
    assert set(model._peft.peft_config) == {"idle"}


async def test_an_urgent_request_overtakes_waiting_ones(rig: Rig) -> None:
    """Requests with prompt logprobs share no batch with others, so that two batches wait here."""
    done: list[str] = []

    async def run(name: str, priority: int, settings: SamplingSettings) -> None:
        async for _ in rig.engine.sample(SampleRequest(name, PROMPT, settings, priority=priority)):
            pass
        done.append(name)

    plain = SamplingSettings(max_tokens=2)
    first = asyncio.create_task(run("running", 0, SamplingSettings(max_tokens=20)))
    await asyncio.sleep(0.01)
    late = asyncio.create_task(run("late", 5, SamplingSettings(max_tokens=2, prompt_logprobs=0)))
    await asyncio.sleep(0)
    await asyncio.gather(first, late, run("urgent", 1, plain))
    assert done == ["running", "urgent", "late"]


async def test_bfloat16_answers_near_float32(rig: Rig, tmp_path: Path) -> None:
    half = make_rig("transformers", tmp_path / "half", rig.base, dtype="bfloat16")
    try:
        await rig.load("acme/p@1", std=0.05)
        report = await half.load("acme/p@1", std=0.05)
        assert report.tensors_equal
        ours, theirs = await half.scores("acme/p@1"), await rig.scores("acme/p@1")
        assert sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours) <= 0.1
    finally:
        await half.engine.close()
