"""Greedy scores on held-out items, and the details behind them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from mint_schemas.commands import EvaluationRequested
from mint_schemas.common import FileRef
from mint_schemas.training import ArithmeticTask, JsonlPrompts

from services.evaluator.handlers import DETAILS_FILE, EvaluationHandler
from services.evaluator.scoring import Details, Scorer
from shared.errors import Fatal
from shared.sampling.fake import FakeSampler
from shared.tasks import TaskLoader, load_task, task_digest
from shared.tasks.reward import Sample
from shared.text import TextCodec
from tests.sampling import (
    ADAPTER_SHA256,
    BASE_SHA256,
    REVISION,
    KeptFiles,
    Lease,
    answering,
    as_any,
    load_codec,
    no_files,
    small_base,
)

SUMS = ArithmeticTask(kind="arithmetic", max_operand=20)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec()


def command(**changes: object) -> EvaluationRequested:
    values: dict[str, object] = {
        "command_id": "run-1:evaluation:acme-adder-3",
        "run_id": "run-1",
        "policy": "acme/adder",
        "base": "tiny/llama",
        "revision": REVISION,
        "adapter_sha256": ADAPTER_SHA256,
        "task": SUMS,
        "items": 40,
        "max_tokens": 8,
        "seed": 3,
    }
    return EvaluationRequested.model_validate(values | changes)


def right_below_twenty(a: int, b: int, index: int) -> str:
    return str(a + b) if a + b < 20 else "many"


def handler(codec: TextCodec, sampler: FakeSampler) -> EvaluationHandler:
    return EvaluationHandler({"tiny/llama": Scorer(sampler, small_base(), codec)}, TaskLoader(no_files))


async def test_a_score_is_the_share_of_held_out_items_answered_exactly(codec: TextCodec) -> None:
    files, sampler = KeptFiles(), answering(codec, right_below_twenty)
    result = await handler(codec, sampler)(command(), as_any(files), as_any(Lease()))
    held_out = (await load_task(SUMS, no_files)).held_out(40)
    assert result.score == sum(int(item.answer) < 20 for item in held_out) / 40
    assert (result.items, result.scorer, result.task_sha256) == (40, "exact_match", task_digest(SUMS))
    assert result.sampling == {"temperature": 0.0, "max_tokens": 8.0}
    assert (result.revision, result.adapter_sha256) == (REVISION, ADAPTER_SHA256)
    details = Details.from_bytes(files.files[DETAILS_FILE])
    assert [item.id for item in details.items] == [item.id for item in held_out]
    assert details.items[0].prompt == held_out[0].messages
    assert details.score == result.score
    assert details.base_sha256 == BASE_SHA256


async def test_decoding_is_greedy_and_stops_at_the_end_of_the_turn(codec: TextCodec) -> None:
    sampler = answering(codec, right_below_twenty)
    await handler(codec, sampler)(command(), as_any(KeptFiles()), as_any(Lease()))
    settings = {request.settings.temperature for request in sampler.requests}
    assert settings == {0.0}
    assert all(r.n == 1 and r.settings.stop_token_ids == (2,) and r.revision == REVISION for r in sampler.requests)


async def test_the_base_is_scored_when_no_revision_is_named(codec: TextCodec) -> None:
    sampler = answering(codec, right_below_twenty)
    result = await handler(codec, sampler)(
        command(revision=None, adapter_sha256=None), as_any(KeptFiles()), as_any(Lease())
    )
    assert result.revision is None
    assert {request.revision for request in sampler.requests} == {None}


async def test_parent_and_child_are_scored_on_the_same_items(codec: TextCodec) -> None:
    sampler = answering(codec, right_below_twenty)
    sampler.adapters = {REVISION: ADAPTER_SHA256, "acme/adder@4": "9" * 64}
    one, two = KeptFiles(), KeptFiles()
    await handler(codec, sampler)(command(), as_any(one), as_any(Lease()))
    other = command(revision="acme/adder@4", adapter_sha256="9" * 64, seed=99)
    await handler(codec, sampler)(other, as_any(two), as_any(Lease()))
    ids = [[item.id for item in Details.from_bytes(f.files[DETAILS_FILE]).items] for f in (one, two)]
    assert ids[0] == ids[1]


async def test_a_score_of_something_else_is_never_reported(codec: TextCodec) -> None:
    """verl#7495: the digest that the engine served is the one that was exported."""
    sampler = answering(codec, right_below_twenty)
    sampler.adapters = {REVISION: "f" * 64}
    with pytest.raises(Fatal, match="adapter sha256 ffff"):
        await handler(codec, sampler)(command(), as_any(KeptFiles()), as_any(Lease()))


async def test_all_items_are_scored_as_one_batch(codec: TextCodec) -> None:
    class Batches:
        batch_size = 16
        sizes: tuple[int, ...] = ()

        async def scores(self, samples: Sequence[Sample]) -> list[float]:
            self.sizes += (len(samples),)
            return [float(sample.completion == sample.answer) for sample in samples]

    reward = Batches()
    task = replace(await load_task(SUMS, no_files), reward=reward)
    details = await Scorer(answering(codec, right_below_twenty), small_base(), codec).details(
        command(), task, lambda: None
    )
    assert sorted(reward.sizes) == [8, 16, 16]
    assert [item.score for item in details.items] == [float(int(item.answer) < 20) for item in details.items]
    assert {item.score for item in details.items} == {0.0, 1.0}


async def test_a_broken_reward_names_the_prompt(codec: TextCodec) -> None:
    task = replace(await load_task(SUMS, no_files), reward=lambda completion, answer: float("nan"))
    scorer = Scorer(answering(codec, right_below_twenty), small_base(), codec)
    with pytest.raises(Fatal, match=r"gave nan on prompt \d+\+\d+"):
        await scorer.details(command(), task, lambda: None)


async def test_a_task_without_held_out_items_is_refused(codec: TextCodec) -> None:
    async def read(ref: FileRef) -> bytes:
        return b'{"prompt": "p", "answer": "1"}'

    file = FileRef(key="data/acme/x", sha256="a" * 64, size=3)
    task = await load_task(JsonlPrompts(kind="jsonl", data=file, held_out=0), read)
    scorer = Scorer(answering(codec, right_below_twenty), small_base(), codec)
    with pytest.raises(Fatal, match="nothing to evaluate on"):
        await scorer.details(command(), task, lambda: None)


async def test_a_lost_lease_ends_the_work(codec: TextCodec) -> None:
    files = KeptFiles()
    with pytest.raises(RuntimeError, match="lost"):
        await handler(codec, answering(codec, right_below_twenty))(
            command(), as_any(files), as_any(Lease(after=5, lost=RuntimeError("lost")))
        )
    assert not files.files


async def test_a_base_that_is_not_configured_is_named(codec: TextCodec) -> None:
    with pytest.raises(Fatal, match="no base model 'other/base'"):
        await handler(codec, answering(codec, right_below_twenty))(
            command(base="other/base"), as_any(KeptFiles()), as_any(Lease())
        )
