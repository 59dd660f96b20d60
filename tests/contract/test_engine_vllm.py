"""vLLM alone: equality with Transformers, and what happens when its process dies."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from shared.engine.children import RECORD_FILE
from shared.engine.port import EngineDead
from shared.store.memory import MemoryStore
from tests.contract.engine_rig import PROMPT, STRONG, Rig, close_to, make_rig, peft_greedy, smollm2

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
    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = await asyncio.to_thread(make_rig, "vllm", tmp_path_factory.mktemp("vllm"), base)
    assert dict(os.environ) == before
    yield made
    await made.engine.close()


async def test_greedy_tokens_and_logprobs_equal_transformers(
    rig: Rig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reference = await asyncio.to_thread(make_rig, "transformers", tmp_path_factory.mktemp("hf"), rig.base)
    try:
        for i, adapter in enumerate(({"rank": 8}, {"rank": 3, "use_rslora": True}, {"rank": 16, "alpha": 8.0})):
            revision = f"acme/p{i}@1"
            for each in (rig, reference):
                await each.load(revision, seed=i, std=0.05, **adapter)
        for revision in (None, "acme/p0@1", "acme/p1@1", "acme/p2@1"):
            (ours,), (theirs,) = await rig.ask(revision, max_tokens=12), await reference.ask(revision, max_tokens=12)
            assert ours.tokens == theirs.tokens
            assert close_to(ours.logprobs, theirs.logprobs, 1e-3)
            assert close_to(await rig.scores(revision), await reference.scores(revision), 1e-3)
    finally:
        await reference.engine.close()


async def test_twelve_prompts_at_once_give_the_greedy_tokens_of_transformers(
    rig: Rig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One adapter, fp32; and plain PEFT, from the files as they come out of the store, says the same."""
    store = MemoryStore()
    manifest, where = rig.write("acme/adder@1", rank=8, std=0.05, seed=3)
    for name, ref in manifest.files.items():
        await store.put(ref.key, where / name)
    fetched = tmp_path_factory.mktemp("fetched")
    for name, ref in manifest.files.items():
        await store.fetch(ref, fetched / name)
    prompts = [(*PROMPT[:5], 216 + i, *PROMPT[6:], 30 + 7 * i) for i in range(12)]
    await rig.engine.load(manifest, fetched)
    ours = [a[0].tokens for a in await asyncio.gather(*(rig.ask("acme/adder@1", prompt=p) for p in prompts))]
    reference = await asyncio.to_thread(make_rig, "transformers", tmp_path_factory.mktemp("hf"), rig.base)
    try:
        await reference.engine.load(manifest, fetched)
        theirs = [
            a[0].tokens for a in await asyncio.gather(*(reference.ask("acme/adder@1", prompt=p) for p in prompts))
        ]
    finally:
        await reference.engine.close()
    assert ours == theirs
    assert ours == await asyncio.to_thread(peft_greedy, rig.base, fetched, prompts, 8)
    assert ours != [a[0].tokens for a in await asyncio.gather(*(rig.ask(prompt=p) for p in prompts))]


async def test_a_burst_of_seeded_requests_longer_than_a_step_leaves_the_engine_alive(rig: Rig) -> None:
    """A prefill in parts rewinds a seeded request's generator, which a CPU generator cannot do."""
    prompts = [tuple(range(100 + i, 164 + i)) for i in range(60)]
    assert sum(map(len, prompts)) > 2048
    answers = await asyncio.gather(
        *(rig.ask(prompt=prompt, seed=i, max_tokens=3, temperature=1.0) for i, prompt in enumerate(prompts))
    )
    assert [len(answer.tokens) for (answer,) in answers] == [3] * len(prompts)
    assert len((await rig.ask())[0].tokens) == 8


async def test_a_look_at_an_idle_engine_costs_its_processes_next_to_nothing(rig: Rig) -> None:
    """vLLM's own spin for a second after each, and a learner beside them lacks their cores."""
    processes = psutil.Process().children(recursive=True)

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    await rig.ask(max_tokens=2)
    await asyncio.sleep(0.5)
    before, looks = used(), 10
    for _ in range(looks):
        await rig.engine.resident()
        await asyncio.sleep(0.3)
    assert used() - before < 0.05 * looks


async def test_an_unknown_version_sends_base_requests_through_a_zero_adapter(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#48421, where the operators are vLLM's own: slots full, base logprobs equal a quiet run's."""
    monkeypatch.setattr("shared.engine.vllm.grouped.VERSIONS", frozenset())
    rig = await asyncio.to_thread(make_rig, "vllm", tmp_path_factory.mktemp("zero"), smollm2())
    try:
        quiet = await rig.scores()
        revisions = [f"acme/p{i}@1" for i in range(4)]
        for i, revision in enumerate(revisions):
            await rig.load(revision, seed=i, std=STRONG)
        assert {adapter.revision for adapter in await rig.engine.resident()} == set(revisions)
        scores, *_ = await asyncio.gather(rig.scores(), *(rig.ask(revision) for revision in revisions[:3]))
        assert close_to(scores, quiet, 1e-4)
    finally:
        await rig.engine.close()


async def test_a_dead_process_is_noticed_and_leaves_nothing(rig: Rig) -> None:
    """The last test here: it ends the engine."""
    (record,) = rig.directory.glob(f"state/{RECORD_FILE}")
    children = psutil.Process().children(recursive=True)
    assert str(max(children, key=lambda p: p.memory_info().rss).pid) in record.read_text()
    running = asyncio.create_task(rig.ask(max_tokens=400))
    await asyncio.sleep(1.0)
    started = time.monotonic()
    max(children, key=lambda p: p.memory_info().rss).kill()
    with pytest.raises(EngineDead):
        await running
    with pytest.raises(EngineDead):
        await rig.ask(prompt=PROMPT)
    with pytest.raises(EngineDead):
        await rig.load("acme/late@1")
    assert time.monotonic() - started < 30.0
    await rig.engine.close()
    assert not [p for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not record.exists()
