"""vLLM at its bounds, on one engine with few blocks of cache: adapters and grammars that it must never meet, a full
batch and priorities, preemption, loads without end."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from shared.bases import load_base
from shared.engine.port import AdapterRefused, EngineError, SampleRequest, SamplingSettings
from tests.broken_adapters import BROKEN, write_broken
from tests.contract.engine_rig import PROMPT, STRONG, Rig, close_to, make_rig
from tests.hard_grammars import KEPT, REFUSED
from tests.tiny import TINY_NAME, TINY_TOKEN, make_tiny_base

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
# 32 tokens of 2 layers, keys and values, 4 heads of 32, fp32.
BLOCK_TOKENS, BLOCK_BYTES = 32, 32 * 2 * 2 * 4 * 32 * 4
BLOCKS = 96


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    directory = tmp_path_factory.mktemp("limits")
    base = load_base(TINY_NAME, TINY_TOKEN, make_tiny_base(directory / "base", sharpness=20.0, width=256, heads=8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = await asyncio.to_thread(make_rig, "vllm", directory, base, kv_cache_bytes=BLOCKS * BLOCK_BYTES)
    yield made
    await made.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def rig(shared_rig: Rig) -> AsyncIterator[Rig]:
    yield shared_rig
    await shared_rig.clear()


def _engine(rig: Rig) -> Any:
    """With its insides; the class is imported by nobody but the engine's own factory."""
    return rig.engine


def _blocks(rig: Rig) -> int:
    return int(_engine(rig)._llm.vllm_config.cache_config.num_gpu_blocks)


async def test_a_broken_adapter_never_reaches_vllm_and_the_next_request_is_served(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#3310, vllm#11702, lorax#311: each kind of damage is refused, and the engine serves on."""
    engine, added = _engine(rig), 0
    real = engine._llm.add_lora

    async def add_lora(lora: Any) -> Any:
        nonlocal added
        added += 1
        return await real(lora)

    monkeypatch.setattr(engine._llm, "add_lora", add_lora)
    await rig.load("acme/good@1", std=STRONG)
    quiet, (plain,) = await rig.scores("acme/good@1"), await rig.ask(max_tokens=2)
    for i, (name, (damage, message)) in enumerate(BROKEN.items()):
        manifest = write_broken(tmp_path / str(i), rig.base, damage)
        with pytest.raises(AdapterRefused, match=message):
            await engine.load(manifest, tmp_path / str(i))
        assert (await rig.ask(max_tokens=2))[0].tokens == plain.tokens, name
    assert added == 1
    assert [adapter.revision for adapter in await engine.resident()] == ["acme/good@1"]
    assert close_to(await rig.scores("acme/good@1"), quiet, 1e-5)


@pytest.mark.parametrize("where", ["mint_read_back", "add_lora"])
async def test_a_load_that_fails_half_way_leaves_no_id_and_the_old_revision_serves(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """dynamo#8630: a fault before or after vLLM has taken the adapter."""
    engine = _engine(rig)
    await rig.load("acme/p@1", seed=1, std=STRONG)
    quiet, listed = await rig.scores("acme/p@1"), await engine._llm.list_loras()
    manifest, directory = rig.write("acme/p@2", seed=2, std=STRONG)

    async def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "collective_rpc" if where == "mint_read_back" else where, fail)
        with pytest.raises((EngineError, AdapterRefused), match="no space left"):
            await engine.load(manifest, directory)
    assert set(await engine._llm.list_loras()) == set(listed)
    assert [adapter.revision for adapter in await engine.resident()] == ["acme/p@1"]
    assert close_to(await rig.scores("acme/p@1"), quiet, 1e-5)
    await engine.load(manifest, directory)
    assert not close_to(await rig.scores("acme/p@2"), quiet, 1e-2)


async def test_what_a_failed_removal_left_goes_before_the_next_load(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left in vLLM's cache, it would make vLLM evict another adapter behind our back."""
    engine = _engine(rig)

    async def fail(handle: int) -> bool:
        raise RuntimeError("the call was lost")

    for i in range(4):
        await rig.load(f"acme/p{i}@1", seed=i)
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "remove_lora", fail)
        with pytest.raises(EngineError, match="the call was lost"):
            await engine.unload("acme/p0@1")
        with pytest.raises(EngineError, match="the call was lost"):
            await rig.load("acme/p4@1", seed=4)
    await rig.load("acme/p4@1", seed=4)
    listed = await engine.resident()
    assert {adapter.revision for adapter in listed} == {f"acme/p{i}@1" for i in range(1, 5)}
    assert len(await engine._llm.list_loras()) == 4


async def test_a_grammar_that_cannot_be_compiled_is_refused_and_the_engine_serves_on(rig: Rig) -> None:
    (plain,) = await rig.ask(max_tokens=2)
    for name, grammar in REFUSED.items():
        with pytest.raises(ValueError, match=r"^(json_schema|regex) ") as refused:
            await rig.ask(grammar=grammar, max_tokens=4)
        assert len(str(refused.value)) < 1000, name
        assert (await rig.ask(max_tokens=2))[0].tokens == plain.tokens, name


async def test_a_grammar_that_is_hard_is_followed_and_the_engine_serves_on(rig: Rig) -> None:
    (plain,) = await rig.ask(max_tokens=2)
    for name, grammar in KEPT.items():
        (answer,) = await rig.ask(grammar=grammar, max_tokens=24, temperature=1.0)
        assert answer.reasons in (["stop"], ["length"]), name
        assert (await rig.ask(max_tokens=2))[0].tokens == plain.tokens, name


async def test_a_lower_number_runs_earlier_when_the_batch_is_full(rig: Rig) -> None:
    """Each running request has a block or more, and twice as many came as there are; places come free one by one."""
    order: list[str] = []
    several = asyncio.Event()

    async def run(name: str, priority: int, max_tokens: int) -> None:
        settings = SamplingSettings(max_tokens=max_tokens, temperature=0.0)
        async for _ in rig.engine.sample(SampleRequest(name, PROMPT, settings, priority=priority)):
            if name not in order:
                order.append(name)
            if len(order) == 8:
                several.set()

    count = 2 * _blocks(rig)
    early = [asyncio.create_task(run(f"early-{i}", 10, 20 + 2 * i)) for i in range(count)]
    await several.wait()
    late = [("background", 10), ("prewarm", 5), ("interactive", 0)]
    await asyncio.gather(*early, *(run(name, priority, 4) for name, priority in late))
    assert len(order) == count + len(late)
    assert order.index("interactive") < order.index("prewarm") < order.index(f"early-{count - 1}")
    assert order[-1] == "background"


async def test_what_is_preempted_gives_the_tokens_of_a_quiet_run(rig: Rig) -> None:
    """Eleven start with eight blocks each; within 24 tokens each needs a ninth, and some must give theirs back."""
    assert 11 * 8 < _blocks(rig) < 11 * 9
    prompts = [tuple(range(100 + i, 350 + i)) for i in range(11)]
    how: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0}
    quiet = [(await rig.ask(prompt=prompt, seed=i, **how))[0] for i, prompt in enumerate(prompts)]
    busy = await asyncio.gather(*(rig.ask(prompt=prompt, seed=i, **how) for i, prompt in enumerate(prompts)))
    assert [answer[0].tokens for answer in busy] == [answer.tokens for answer in quiet]
    assert all(close_to(answer[0].logprobs, own.logprobs, 1e-3) for answer, own in zip(busy, quiet, strict=True))


def _memory() -> int:
    gc.collect()
    me = psutil.Process()
    return sum(process.memory_info().rss for process in [me, *me.children(recursive=True)])


async def test_200_loads_and_unloads_leave_nothing(rig: Rig) -> None:
    """vllm#54839, vllm#42633: resident list empty, memory flat. 200 of these adapters are 100 MB."""
    manifest, where = rig.write("acme/p@1", rank=16)
    assert 200 * manifest.adapter_bytes > 90 * 10**6

    async def churn(times: int) -> None:
        for _ in range(times):
            await rig.engine.load(manifest, where)
            await rig.ask("acme/p@1", max_tokens=1)
            await rig.engine.unload("acme/p@1")

    await churn(40)
    before = _memory()
    await churn(200)
    assert await rig.engine.resident() == []
    assert await _engine(rig)._llm.list_loras() == []
    assert _memory() - before < 30 * 10**6
