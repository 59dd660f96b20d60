"""One behaviour suite over every engine: the fake, Transformers, and vLLM on SmolLM2 in fp32."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import time
import warnings
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from shared.adapters import layout
from shared.adapters.manifest import Probe
from shared.engine.port import (
    AdapterRefused,
    EngineError,
    Grammar,
    InferenceEngine,
    NotResident,
    SampleRequest,
    SamplingSettings,
    SlotsExhausted,
)
from tests.adapters import lora_tensors
from tests.contract.engine_rig import PROMPT, STRONG, Rig, close_to, make_rig, smollm2

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # vLLM and what it brings warn at import and at exit; that is theirs.
    pytest.mark.filterwarnings("ignore"),
]
KINDS = [
    "fake",
    "transformers",
    pytest.param("vllm", marks=[pytest.mark.vllm]),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def shared_rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    base = smollm2() if request.param == "vllm" else None
    if request.param == "vllm" and base is None:
        pytest.skip("SmolLM2 is not converted; run make setup")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rig = await asyncio.to_thread(make_rig, request.param, tmp_path_factory.mktemp(request.param), base)
    yield rig
    await rig.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def rig(shared_rig: Rig) -> AsyncIterator[Rig]:
    yield shared_rig
    await shared_rig.clear()


async def test_it_is_an_engine_and_declares_itself(rig: Rig) -> None:
    has = rig.engine.capabilities()
    assert isinstance(rig.engine, InferenceEngine)
    assert (has.base_name, has.base_sha256) == (rig.base.name, rig.base.sha256)
    assert has.max_rank == 16
    assert has.max_context == 512
    assert has.max_resident >= has.slots >= 3


async def test_a_load_proves_every_module_and_tensor(rig: Rig) -> None:
    manifest, where = rig.write("acme/p@1")
    report = await rig.engine.load(manifest, where)
    assert report.modules_applied == report.modules_expected > 0
    assert report.tensors_equal
    assert report.adapter_sha256 == manifest.adapter_sha256
    (listed,) = await rig.engine.resident()
    assert (listed.revision, listed.adapter_sha256, listed.in_flight) == ("acme/p@1", manifest.adapter_sha256, 0)
    assert listed.bytes == manifest.adapter_bytes


async def test_a_revision_answers_differently_from_the_base(rig: Rig) -> None:
    await rig.load("acme/p@1", std=STRONG)
    assert not close_to(await rig.scores("acme/p@1"), await rig.scores(), 1e-2)


async def test_loading_twice_is_one_load(rig: Rig) -> None:
    manifest, where = rig.write("acme/p@1")
    reports = await asyncio.gather(*(rig.engine.load(manifest, where) for _ in range(8)))
    assert all(report is reports[0] for report in reports)
    assert len(await rig.engine.resident()) == 1


async def test_a_revision_never_changes(rig: Rig) -> None:
    await rig.load("acme/p@1", seed=1)
    with pytest.raises(EngineError, match="a revision never changes"):
        await rig.load("acme/p@1", seed=2)


async def test_what_is_not_loaded_is_never_answered_by_the_base(rig: Rig) -> None:
    with pytest.raises(NotResident, match="acme/p@1"):
        await rig.ask("acme/p@1")
    with pytest.raises(NotResident):
        await rig.ask("")
    with pytest.raises(NotResident):
        await rig.engine.pin("acme/p@1", True)
    await rig.engine.unload("acme/p@1")


async def test_a_zero_delta_loads_is_proved_and_equals_the_base(rig: Rig) -> None:
    manifest, where = rig.write("acme/zero@1", std=0.0)
    report = await rig.engine.load(manifest, where)
    assert manifest.zero_delta
    assert report.modules_applied == report.modules_expected
    assert report.tensors_equal
    assert close_to(await rig.scores("acme/zero@1"), await rig.scores(), 1e-4)


async def test_rslora_scales_by_the_root_of_the_rank(rig: Rig) -> None:
    """vllm#6909: alpha 32, rank 16 → 8.0, not 2.0."""
    tensors = lora_tensors(rig.base, 16, seed=5, std=0.05)
    await rig.load("acme/rs@1", rank=16, alpha=32.0, use_rslora=True, tensors=tensors)
    await rig.load("acme/eight@1", rank=16, alpha=128.0, tensors=tensors)
    await rig.load("acme/two@1", rank=16, alpha=32.0, tensors=tensors)
    rs = await rig.scores("acme/rs@1")
    assert close_to(rs, await rig.scores("acme/eight@1"), 1e-4)
    assert not close_to(rs, await rig.scores("acme/two@1"), 1e-2)


async def test_base_requests_are_untouched_with_every_slot_full(rig: Rig) -> None:
    """vllm#48421: a base request in a mixed batch is served through the last LoRA slot."""
    quiet_scores, (quiet,) = await rig.scores(), await rig.ask()
    revisions = [f"acme/p{i}@1" for i in range(3)]
    for i, revision in enumerate(revisions):
        await rig.load(revision, seed=i, std=STRONG)
    own = [(await rig.ask(revision))[0] for revision in revisions]
    for _ in range(2):
        scores, (mixed,), *answers = await asyncio.gather(
            rig.scores(), rig.ask(), *(rig.ask(revision) for revision in revisions)
        )
        assert close_to(scores, quiet_scores, 1e-4)
        assert mixed.tokens == quiet.tokens
        assert close_to(mixed.logprobs, quiet.logprobs, 1e-4)
        assert [answer[0].tokens for answer in answers] == [answer.tokens for answer in own]


async def test_prompt_logprobs_at_once_over_adapters_and_base(rig: Rig) -> None:
    """vllm#16668, vllm#51594: 8 at once over 3 adapters and base, with plain ones → each equals its quiet result."""
    revisions: list[str | None] = [None, *(f"acme/p{i}@1" for i in range(3))]
    for i, revision in enumerate(revisions):
        if revision is not None:
            await rig.load(revision, seed=i, std=STRONG)
    prompts = {revision: (*PROMPT, 30 + i) for i, revision in enumerate(revisions)}
    quiet = {revision: await rig.scores(revision, prompts[revision]) for revision in revisions}
    plain = [(await rig.ask(revision))[0].tokens for revision in revisions]
    mixed = await asyncio.gather(
        *(rig.scores(r, prompts[r]) for r in revisions * 2), *(rig.ask(revision) for revision in revisions)
    )
    for revision, scores in zip(revisions * 2, mixed[:8], strict=True):
        assert close_to(scores, quiet[revision], 1e-4)
    assert [answer[0].tokens for answer in mixed[8:]] == plain
    assert [(await rig.ask(revision))[0].tokens for revision in revisions] == plain


async def test_more_revisions_than_slots_take_turns(rig: Rig) -> None:
    revisions = [f"acme/p{i}@1" for i in range(4)]
    for i, revision in enumerate(revisions):
        await rig.load(revision, seed=i, std=STRONG)
    own = [(await rig.ask(revision))[0].tokens for revision in revisions]
    answers = await asyncio.gather(*(rig.ask(revision) for revision in revisions * 2))
    assert [answer[0].tokens for answer in answers] == own * 2
    assert {adapter.revision for adapter in await rig.engine.resident()} == set(revisions)


async def test_a_truncated_file_is_refused_at_once_and_the_base_answers(rig: Rig) -> None:
    """vllm#3310: a bad adapter kills the engine, clients hang."""
    quiet = await rig.scores()
    manifest, where = rig.write("acme/p@1")
    data = (where / layout.TENSOR_FILE).read_bytes()
    (where / layout.TENSOR_FILE).write_bytes(data[: len(data) // 2])
    started = time.monotonic()
    with pytest.raises(AdapterRefused, match="truncated"):
        await rig.engine.load(manifest, where)
    assert time.monotonic() - started < 1.0
    assert await rig.engine.resident() == []
    assert close_to(await rig.scores(), quiet, 1e-5)


async def test_keys_that_match_nothing_are_refused(rig: Rig) -> None:
    """vllm#34186: `model.language_model.layers…` loads, and behaves like the base."""
    tensors = {
        name.replace("model.layers", "model.language_model.layers"): value
        for name, value in lora_tensors(rig.base, 8, seed=0).items()
    }
    with pytest.raises(AdapterRefused, match=r"0 of \d+ modules applied"):
        await rig.load("acme/p@1", tensors=tensors)
    assert await rig.engine.resident() == []


async def test_a_rank_above_the_buffer_is_refused_and_others_serve_on(rig: Rig) -> None:
    """sglang#7808"""
    await rig.load("acme/p@1", std=STRONG)
    before = await rig.scores("acme/p@1")
    with pytest.raises(AdapterRefused, match="rank 64 is outside 1 to 16"):
        await rig.load("acme/q@1", rank=64)
    assert close_to(await rig.scores("acme/p@1"), before, 1e-5)


async def test_a_probe_decides_in_fp32(rig: Rig) -> None:
    manifest, where = rig.write("acme/p@1", std=STRONG)
    await rig.engine.load(manifest, where)
    scores = await rig.scores("acme/p@1")
    await rig.engine.unload("acme/p@1")
    probe = Probe(prompt=PROMPT, logprobs=tuple(scores), dtype="float32")
    report = await rig.engine.load(manifest.model_copy(update={"probe": probe}), where)
    assert close_to(list(report.probe_logprobs), scores, 1e-4)
    await rig.engine.unload("acme/p@1")
    wrong = probe.model_copy(update={"logprobs": (scores[0] + 0.01, *scores[1:])})
    with pytest.raises(AdapterRefused, match="probe logprobs differ"):
        await rig.engine.load(manifest.model_copy(update={"probe": wrong}), where)
    assert await rig.engine.resident() == []
    rounded = wrong.model_copy(update={"dtype": "bfloat16"})
    await rig.engine.load(manifest.model_copy(update={"probe": rounded}), where)


async def test_the_least_recently_used_goes_first_and_pinned_ones_never(rig: Rig) -> None:
    for i in range(4):
        await rig.load(f"acme/p{i}@1", seed=i)
    await rig.engine.pin("acme/p0@1", True)
    await rig.ask("acme/p1@1")
    await rig.load("acme/p4@1", seed=4)
    assert {a.revision for a in await rig.engine.resident()} == {"acme/p0@1", "acme/p1@1", "acme/p3@1", "acme/p4@1"}
    for revision in ("acme/p1@1", "acme/p3@1", "acme/p4@1"):
        await rig.engine.pin(revision, True)
    with pytest.raises(SlotsExhausted):
        await rig.load("acme/p5@1", seed=5)
    await rig.engine.pin("acme/p3@1", False)
    await rig.load("acme/p5@1", seed=5)
    assert "acme/p3@1" not in {a.revision for a in await rig.engine.resident()}


async def test_a_reloaded_place_never_serves_the_old_weights(rig: Rig) -> None:
    """vllm#42125: a reused adapter id silently serves what was there before."""
    await rig.load("acme/p@1", seed=1, std=STRONG)
    first = await rig.scores("acme/p@1")
    await rig.engine.unload("acme/p@1")
    await rig.load("acme/p@2", seed=2, std=STRONG)
    assert not close_to(await rig.scores("acme/p@2"), first, 1e-2)
    await rig.load("acme/p@1", seed=1, std=STRONG)
    assert close_to(await rig.scores("acme/p@1"), first, 1e-4)


async def test_one_name_loaded_again_never_serves_the_cache_of_what_it_was(rig: Rig) -> None:
    """vllm#42125, sglang#8263: warm A ×12, then B for the same prompt, under its own name and under A's → B 10/10."""

    async def ask(revision: str, times: int) -> list[list[int]]:
        # Longer than a block of the cache.
        return [a[0].tokens for a in await asyncio.gather(*(rig.ask(revision, **how) for _ in range(times)))]

    how: dict[str, Any] = {"prompt": PROMPT * 11, "max_tokens": 4}
    await rig.load("acme/p@1", seed=1, std=STRONG)
    warm = await ask("acme/p@1", 1) + await ask("acme/p@1", 11)
    await rig.load("acme/p@2", seed=2, std=STRONG)
    moved = await ask("acme/p@2", 10)
    await rig.engine.unload("acme/p@1")
    await rig.load("acme/p@1", seed=2, std=STRONG)
    again = await ask("acme/p@1", 10)
    assert warm == [warm[0]] * 12
    assert moved[0] != warm[0]
    assert moved == [moved[0]] * 10
    assert again == moved


async def test_hot_loads_leave_running_requests_on_their_own_adapters(rig: Rig) -> None:
    """vllm#47724: greedy A1, A2 while A3, A4 load → tokens equal a quiet run."""
    running = ("acme/a@1", "acme/a@2")
    late = [rig.write(f"acme/a@{i}", seed=i, std=STRONG) for i in (3, 4)]
    for i, revision in enumerate(running):
        await rig.load(revision, seed=i, std=STRONG)
    quiet = [a[0].tokens for a in await asyncio.gather(*(rig.ask(revision, max_tokens=48) for revision in running))]
    tasks = [asyncio.create_task(rig.ask(revision, max_tokens=48)) for revision in running]
    for manifest, where in late:
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        await rig.engine.load(manifest, where)
    assert [answers[0].tokens for answers in await asyncio.gather(*tasks)] == quiet
    assert quiet[0] != quiet[1]
    assert len(await rig.engine.resident()) == 4


async def test_a_rollout_in_flight_ends_on_its_own_revision(rig: Rig) -> None:
    """trl#7017: publish under a rollout, past every slot and place → it ends on its own revision."""
    newer = [rig.write(f"acme/p@{i}", seed=i, std=STRONG) for i in range(2, 7)]
    await rig.load("acme/p@1", seed=1, std=STRONG)
    quiet = [answer.tokens for answer in await rig.ask("acme/p@1", n=2, temperature=1.0, max_tokens=48)]
    rollout = asyncio.create_task(rig.ask("acme/p@1", n=2, temperature=1.0, max_tokens=48))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="in flight"):
        await rig.engine.unload("acme/p@1")
    for manifest, where in newer:
        await rig.engine.load(manifest, where)
    assert [answer.tokens for answer in await rollout] == quiet
    assert "acme/p@6" in {adapter.revision for adapter in await rig.engine.resident()}


async def test_idle_adapters_are_listed_like_busy_ones(rig: Rig) -> None:
    """llm-d-router#2605: residency, slots included, and not activity."""
    for i in range(4):
        await rig.load(f"acme/p{i}@1", seed=i)
    await rig.ask("acme/p3@1")
    listed = await rig.engine.resident()
    assert {adapter.revision for adapter in listed} == {f"acme/p{i}@1" for i in range(4)}
    assert [adapter.in_flight for adapter in listed] == [0] * 4
    assert sum(adapter.in_slot for adapter in listed) == min(4, rig.engine.capabilities().slots)


@pytest.mark.parametrize("field", ["base", "base_sha256", "tokenizer_sha256", "chat_template_sha256"])
async def test_an_adapter_of_another_base_tokenizer_or_template_is_refused(rig: Rig, field: str) -> None:
    """lorax#311, lorax#71"""
    manifest, where = rig.write("acme/p@1")
    with pytest.raises(AdapterRefused, match=f"{field} is 'eeee"):
        await rig.engine.load(manifest.model_copy(update={field: "e" * 64}), where)
    assert await rig.engine.resident() == []


async def test_sequences_draw_from_seeds_of_their_own(rig: Rig) -> None:
    """With n > 1 some engines use seed + i, so that seed 8 repeats sequence 2 of seed 7."""
    seven = await rig.ask(n=4, seed=7, temperature=1.0)
    eight = await rig.ask(n=4, seed=8, temperature=1.0)
    assert len({tuple(answer.tokens) for answer in [*seven, *eight]}) == 8
    again, _ = await asyncio.gather(rig.ask(n=4, seed=7, temperature=1.0), rig.ask(n=4, seed=9, temperature=1.0))
    assert [a.tokens for a in again] == [a.tokens for a in seven]
    assert [len(a.tokens) for a in seven] == [8] * 4


async def test_sampled_logprobs_are_of_what_was_sampled_from(rig: Rig) -> None:
    """trl#4159: at temperature T the differences between logprobs are those at 1, divided by T."""
    (plain,) = await rig.ask(max_tokens=1, logprobs=10)
    (warm,) = await rig.ask(max_tokens=1, logprobs=10, temperature=0.6)
    tokens = list(plain.top[0])[:5]
    for a, b in itertools.pairwise(tokens):
        difference = (plain.top[0][a] - plain.top[0][b]) / 0.6
        assert warm.top[0][a] - warm.top[0][b] == pytest.approx(difference, abs=1e-3)
    assert warm.top[0][warm.tokens[0]] == pytest.approx(warm.logprobs[0], abs=1e-6)
    (alone,) = await rig.ask(max_tokens=4, temperature=1.0, top_k=1, logprobs=5)
    assert close_to(alone.logprobs, [0.0] * 4, 1e-6)
    assert all(len(top) == 1 for top in alone.top)


async def test_greedy_and_prompt_logprobs_agree(rig: Rig) -> None:
    (answer,) = await rig.ask(max_tokens=6)
    scores = await rig.scores(prompt=(*PROMPT, *answer.tokens))
    assert close_to(scores[-6:], answer.logprobs, 1e-4)


async def test_bias_and_penalties_change_what_is_drawn(rig: Rig) -> None:
    (biased,) = await rig.ask(max_tokens=3, logit_bias={77: 100.0})
    assert biased.tokens == [77] * 3
    bias = {77: 100.0, 78: 60.0}
    (plain,) = await rig.ask(max_tokens=3, logit_bias=bias, logprobs=2)
    (penalised,) = await rig.ask(
        max_tokens=3, logit_bias=bias, logprobs=2, presence_penalty=1.5, frequency_penalty=0.25
    )
    assert plain.tokens == penalised.tokens == [77] * 3
    for step, fall in enumerate((0.0, 1.75, 2.0)):
        before, after = plain.top[step], penalised.top[step]
        assert (before[77] - before[78]) - (after[77] - after[78]) == pytest.approx(fall, abs=1e-3)


async def test_a_sequence_ends_at_a_stop_token_or_at_its_length(rig: Rig) -> None:
    (whole,) = await rig.ask(max_tokens=8)
    assert whole.reasons == ["length"]
    stop = whole.tokens[3]
    (cut,) = await rig.ask(max_tokens=8, stop_token_ids=(stop,))
    assert cut.reasons == ["stop"]
    assert cut.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
    (none,) = await rig.ask(max_tokens=1, logprobs=None)
    assert none.logprobs == []


async def test_prompt_logprobs_come_once_with_sequence_zero(rig: Rig) -> None:
    answers = await rig.ask(n=3, temperature=1.0, prompt_logprobs=0)
    assert [len(answer.prompt_logprobs) for answer in answers] == [1, 0, 0]
    assert answers[0].prompt_logprobs[0][0] is None
    assert len(answers[0].prompt_logprobs[0]) == len(PROMPT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 600}, "max_context is 512"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (-3,)}, "stop_token_ids"),
        ({"prompt": ()}, "prompt is empty"),
        ({"prompt": (10**6,)}, "prompt"),
        ({"n": 0}, "n is 0"),
    ],
)
async def test_requests_outside_the_bounds_are_named(rig: Rig, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await rig.ask(**change)  # type: ignore[arg-type]


SCHEMA = {
    "type": "object",
    "properties": {"sure": {"enum": ["yes", "no"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sure", "count"],
    "additionalProperties": False,
}
CODE = "[0-9]{3}-[a-f]{2}"


async def test_a_grammar_is_kept_or_refused(rig: Rig) -> None:
    """Greedy, seeded with n > 1, and among plain requests, which it leaves as they are."""
    grammars = Grammar("json_schema", json.dumps(SCHEMA)), Grammar("regex", CODE)
    if not rig.engine.capabilities().structured_output:
        for grammar in grammars:
            with pytest.raises(ValueError, match="has no structured output"):
                await rig.ask(grammar=grammar)
        return
    await rig.load("acme/p@1", std=STRONG)
    quiet = [(await rig.ask(revision))[0].tokens for revision in (None, "acme/p@1")]
    asked: list[dict[str, Any]] = [
        {"revision": revision, "grammar": grammar, "max_tokens": 40, **how}
        for revision in (None, "acme/p@1")
        for grammar in grammars
        for how in ({}, {"n": 3, "temperature": 1.0, "seed": 5})
    ]
    both = await asyncio.gather(*(rig.ask(**one) for one in asked), rig.ask(), rig.ask("acme/p@1"))
    assert [answers[0].tokens for answers in both[-2:]] == quiet
    for one, answers in zip(asked, both[:-2], strict=True):
        for answer in answers:
            assert answer.reasons == ["stop"]
            said = rig.text(answer.tokens[:-1])
            if one["grammar"].kind == "regex":
                assert re.fullmatch(CODE, said)
                continue
            value = json.loads(said)
            assert value["sure"] in ("yes", "no")
            assert 0 <= value["count"] <= 99
            assert set(value) == {"sure", "count"}
        again = await rig.ask(**one)
        assert [answer.tokens for answer in again] == [answer.tokens for answer in answers]


async def test_logprobs_under_a_grammar_are_of_what_was_sampled_from(rig: Rig) -> None:
    """Everything that the grammar forbids has −inf, which is left out; a stop token of the caller's still stops."""
    if not rig.engine.capabilities().structured_output:
        pytest.skip("declared by other engines")
    (answer,) = await rig.ask(grammar=Grammar("regex", "(yes|no)!"), max_tokens=8, logprobs=5, temperature=1.0)
    assert rig.text(answer.tokens[:-1]) in ("yes!", "no!")
    assert all(len(top) >= 1 and math.isfinite(sum(top.values())) for top in answer.top)
    assert sum(math.exp(value) for value in answer.top[0].values()) == pytest.approx(1.0, abs=1e-3)
    assert close_to(answer.logprobs[-1:], [0.0], 1e-6)
    (cut,) = await rig.ask(
        grammar=Grammar("regex", "(yes|no)!"), max_tokens=8, temperature=1.0, stop_token_ids=(answer.tokens[0],)
    )
    assert (cut.tokens, cut.reasons) == (answer.tokens[:1], ["stop"])


async def test_closing_the_iterator_aborts_and_frees_the_revision(rig: Rig) -> None:
    await rig.load("acme/p@1")
    settings = SamplingSettings(max_tokens=450, temperature=0.0)
    chunks = rig.engine.sample(SampleRequest("long", PROMPT, settings, revision="acme/p@1", n=2))
    first = await anext(chunks)
    assert first.token_ids
    (listed,) = await rig.engine.resident()
    assert listed.in_flight == 1
    with pytest.raises(EngineError, match="in flight"):
        await rig.engine.unload("acme/p@1")
    started = time.monotonic()
    await chunks.aclose()  # type: ignore[attr-defined]
    (listed,) = await rig.engine.resident()
    assert listed.in_flight == 0
    await rig.engine.unload("acme/p@1")
    await rig.ask(max_tokens=1)
    assert time.monotonic() - started < 5.0
