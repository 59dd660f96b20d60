"""Sampling and scoring one step's groups, through a sampler that knows the sums."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from mint_schemas.commands import RolloutRequested
from mint_schemas.training import ArithmeticTask, Regex

from services.rollout.groups import GroupSampler, group_seed
from shared.engine.port import SampleRequest
from shared.errors import Fatal, Refused, Retryable
from shared.rl.record import RolloutRecord
from shared.sampling.fake import FakeSampler, token_logprob
from shared.sampling.port import Sampled, Sampler, SampleStream
from shared.tasks import TaskSet, load_task, taskset
from shared.tasks.reward import Sample
from shared.text import TextCodec
from tests.sampling import ADAPTER_SHA256, BASE_SHA256, REVISION, Lease, answering, load_codec, no_files, small_base

SUMS = ArithmeticTask(kind="arithmetic", max_operand=20)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec()


@pytest.fixture
async def task() -> TaskSet:
    return await load_task(SUMS, no_files)


def command(**changes: object) -> RolloutRequested:
    values: dict[str, object] = {
        "command_id": "run-1:rollout:4",
        "run_id": "run-1",
        "policy": "acme/adder",
        "base": "tiny/llama",
        "step": 4,
        "revision": REVISION,
        "adapter_sha256": ADAPTER_SHA256,
        "task": SUMS,
        "prompts": 5,
        "group_size": 4,
        "max_tokens": 8,
        "temperature": 0.6,
        "seed": 11,
    }
    return RolloutRequested.model_validate(values | changes)


def half_right(a: int, b: int, index: int) -> str:
    return str(a + b) if index % 2 == 0 else "no"


def sampler_for(codec: TextCodec, sampler: Sampler, **changes: object) -> GroupSampler:
    return GroupSampler(sampler=sampler, base=small_base(), codec=codec, **changes)  # type: ignore[arg-type]


async def test_a_record_holds_what_was_sampled_and_by_whom(codec: TextCodec, task: TaskSet) -> None:
    """ART#661: after step k the rollout record names revision k."""
    record = await sampler_for(codec, answering(codec, half_right)).record(command(), task, lambda: None)
    assert (record.revision, record.adapter_sha256, record.base_sha256) == (REVISION, ADAPTER_SHA256, BASE_SHA256)
    assert (record.step, record.temperature, record.task_sha256) == (4, 0.6, task.sha256)
    assert [group.prompt_id for group in record.groups] == [item.id for item in task.step_items(11, 4, 5)]
    for group, item in zip(record.groups, task.step_items(11, 4, 5), strict=True):
        assert group.prompt_ids == tuple(codec.chat_ids(item.messages))
        assert [t.reward for t in group.trajectories] == [1.0, 0.0, 1.0, 0.0]
        first = group.trajectories[0]
        assert first.token_ids == (*codec.encode(item.answer), 2)
        assert first.text == item.answer
        assert first.logprobs == tuple(token_logprob(token) for token in first.token_ids)
        assert first.finish_reason == "stop"
    assert RolloutRecord.from_bytes(record.to_bytes()) == record


async def test_records_of_several_steps_ask_every_prompt_once_an_epoch(codec: TextCodec) -> None:
    """The record's number picks the prompts; its step jumps by the steps that a record gets."""
    small = await load_task(ArithmeticTask(kind="arithmetic", max_operand=9), no_files)
    asked: list[str] = []
    for number in range(1, len(small.train_items) // 20 + 1):
        request = command(step=(number - 1) * 4 + 1, record=number, prompts=20)
        record = await sampler_for(codec, answering(codec, half_right)).record(request, small, lambda: None)
        asked += [group.prompt_id for group in record.groups]
    assert sorted(asked) == sorted(item.id for item in small.train_items)


async def test_a_group_shows_its_prompt_as_text(codec: TextCodec, task: TaskSet) -> None:
    record = await sampler_for(codec, answering(codec, half_right)).record(command(prompts=1), task, lambda: None)
    asked = task.step_items(11, 4, 1)[0].messages[0]["content"]
    assert record.groups[0].prompt.endswith(f"user\n{asked}\nassistant\n")
    assert "<|im_start|>" not in record.groups[0].prompt


async def test_a_record_without_prompt_texts_is_still_read(codec: TextCodec, task: TaskSet) -> None:
    record = await sampler_for(codec, answering(codec, half_right)).record(command(), task, lambda: None)
    content = json.loads(gzip.decompress(record.to_bytes()))
    for group in content["groups"]:
        del group["prompt"]
    read = RolloutRecord.from_bytes(gzip.compress(json.dumps(content).encode()))
    assert [group.prompt for group in read.groups] == [""] * 5
    assert [g.trajectories for g in read.groups] == [g.trajectories for g in record.groups]


async def test_a_completion_that_was_cut_says_so_and_is_scored(codec: TextCodec, task: TaskSet) -> None:
    sampler = answering(codec, lambda a, b, index: str(a + b) if index == 0 else "a very long story about numbers")
    record = await sampler_for(codec, sampler).record(command(max_tokens=5), task, lambda: None)
    for group in record.groups:
        assert [t.finish_reason for t in group.trajectories] == ["stop", "length", "length", "length"]
        assert [t.reward for t in group.trajectories] == [1.0, 0.0, 0.0, 0.0]
        assert [len(t.token_ids) for t in group.trajectories[1:]] == [5, 5, 5]


async def test_a_group_is_scored_as_one_batch_while_others_are_sampled(codec: TextCodec, task: TaskSet) -> None:
    class Batches:
        batch_size = None
        batches: list[list[Sample]]

        async def scores(self, samples: Sequence[Sample]) -> list[float]:
            self.batches.append(list(samples))
            if len(self.batches) == 1:
                await all_asked.wait()
            return [float(sample.completion == sample.answer) for sample in samples]

    class Counting(Wrong):
        asked = 0

        async def sample(self, base: str, request: SampleRequest) -> Sampled:
            self.asked += 1
            if self.asked == 5:
                all_asked.set()
            return await self._inner.sample(base, request)

    all_asked, reward = asyncio.Event(), Batches()
    reward.batches = []
    record = await sampler_for(codec, Counting(answering(codec, half_right)), groups_in_flight=2).record(
        command(), replace(task, reward=reward), lambda: None
    )
    assert all_asked.is_set()
    assert {frozenset(s.id for s in batch) for batch in reward.batches} == {
        frozenset([g.prompt_id]) for g in record.groups
    }
    assert [len(batch) for batch in reward.batches] == [4] * 5
    assert all([t.reward for t in group.trajectories] == [1.0, 0.0, 1.0, 0.0] for group in record.groups)


async def test_the_distribution_is_the_plain_one_at_the_commands_temperature(codec: TextCodec, task: TaskSet) -> None:
    """trl#4159: the learner computes logprobs at the same temperature, so nothing else may shape them."""
    sampler = answering(codec, half_right)
    await sampler_for(codec, sampler).record(command(), task, lambda: None)
    assert len(sampler.requests) == 5
    for request in sampler.requests:
        settings = request.settings
        assert (settings.temperature, settings.top_p, settings.top_k, settings.min_p) == (0.6, 1.0, -1, 0.0)
        assert (settings.presence_penalty, settings.frequency_penalty, settings.logit_bias) == (0.0, 0.0, {})
        assert (settings.logprobs, settings.stop_token_ids, settings.max_tokens) == (0, (2,), 8)
        assert (request.n, request.revision) == (4, REVISION)


async def test_seeds_follow_from_seed_step_and_prompt(codec: TextCodec, task: TaskSet) -> None:
    async def seeds(**changes: object) -> list[int | None]:
        sampler = answering(codec, half_right)
        await sampler_for(codec, sampler, groups_in_flight=1).record(command(**changes), task, lambda: None)
        return [request.seed for request in sampler.requests]

    first = await seeds()
    assert first == await seeds(command_id="run-1:rollout:4:again")
    assert len(set(first)) == 5
    assert not set(first) & set(await seeds(step=5))
    assert not set(first) & set(await seeds(seed=12))
    assert all(0 <= group_seed(1, 1, i, "x") < 2**53 for i in range(100))


async def test_a_prompt_drawn_twice_in_a_step_is_sampled_differently(codec: TextCodec, task: TaskSet) -> None:
    short = replace(task, train_items=task.train_items[:1])
    sampler = answering(codec, half_right)
    await sampler_for(codec, sampler).record(command(prompts=3), short, lambda: None)
    assert len({request.seed for request in sampler.requests}) == 3


async def test_the_same_command_gives_the_same_bytes(codec: TextCodec, task: TaskSet) -> None:
    records = []
    for in_flight in (1, 8):
        sampler = FakeSampler(None, {REVISION: ADAPTER_SHA256}, BASE_SHA256)
        rollout = sampler_for(codec, sampler, groups_in_flight=in_flight)
        records.append(await rollout.record(command(), task, lambda: None))
    assert records[0].to_bytes() == records[1].to_bytes()


async def test_the_base_samples_for_a_policy_without_a_revision(codec: TextCodec, task: TaskSet) -> None:
    sampler = answering(codec, half_right)
    record = await sampler_for(codec, sampler).record(command(revision=None, adapter_sha256=None), task, lambda: None)
    assert record.revision is None
    assert {request.revision for request in sampler.requests} == {None}


class Wrong:
    """Answers through another sampler, but says that something else ran."""

    def __init__(self, inner: FakeSampler, **served: object) -> None:
        self._inner, self._served = inner, served

    async def sample(self, base: str, request: SampleRequest) -> Sampled:
        sampled = await self._inner.sample(base, request)
        return replace(sampled, served=replace(sampled.served, **self._served))  # type: ignore[arg-type]

    @asynccontextmanager
    async def stream(self, base: str, request: SampleRequest) -> AsyncIterator[SampleStream]:
        async with self._inner.stream(base, request) as stream:
            yield stream


@pytest.mark.parametrize(
    ("served", "message"),
    [
        ({"revision": "acme/adder@2"}, "revision acme/adder@2 instead of acme/adder@3"),
        ({"revision": None, "adapter_sha256": None}, "revision None instead of acme/adder@3"),
        ({"adapter_sha256": "f" * 64}, "adapter sha256 ffff"),
        ({"base_sha256": "f" * 64}, "base sha256 ffff"),
        ({"base": "other/base"}, "base other/base"),
    ],
)
async def test_samples_of_anything_else_fail_the_run(
    codec: TextCodec, task: TaskSet, served: dict[str, object], message: str
) -> None:
    """ART#661, verl#7495: a stale or missing adapter must not look like a rollout."""
    wrong = Wrong(answering(codec, half_right), **served)
    with pytest.raises(Fatal, match=message):
        await sampler_for(codec, wrong).record(command(), task, lambda: None)


async def test_an_adapter_where_the_base_was_asked_for_fails_the_run(codec: TextCodec, task: TaskSet) -> None:
    wrong = Wrong(answering(codec, half_right), revision=REVISION, adapter_sha256=ADAPTER_SHA256)
    with pytest.raises(Fatal, match=f"revision {REVISION} instead of None"):
        await sampler_for(codec, wrong).record(command(revision=None, adapter_sha256=None), task, lambda: None)


class Hanging:
    batch_size = None

    async def scores(self, samples: Sequence[Sample]) -> Sequence[float]:
        await asyncio.Event().wait()
        raise AssertionError


def boom(completion: str, answer: str) -> float:
    raise RuntimeError("boom")


def not_a_number(completion: str, answer: str) -> float:
    return float("nan")


@pytest.mark.parametrize("reward", [boom, not_a_number])
async def test_a_broken_reward_fails_the_run_with_the_prompts_id(codec: TextCodec, task: TaskSet, reward: Any) -> None:
    item = task.step_items(11, 4, 1)[0]
    broken = replace(task, reward=reward)
    with pytest.raises(Fatal, match=rf"on prompt {item.id.replace('+', '[+]')}\b"):
        await sampler_for(codec, answering(codec, half_right)).record(command(prompts=1), broken, lambda: None)


async def test_a_lost_lease_ends_a_group_that_is_being_scored(
    codec: TextCodec, task: TaskSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taskset, "CHECK_EVERY_S", 0.001)
    hanging = replace(task, reward=Hanging())
    sampler, lease = answering(codec, half_right), Lease(after=1, lost=LookupError("lost"))
    with pytest.raises(LookupError, match="lost"):
        await sampler_for(codec, sampler).record(command(prompts=1), hanging, lease.check)
    assert len(sampler.requests) == 1


async def test_a_pattern_that_runs_away_fails_the_run(codec: TextCodec) -> None:
    task = await load_task(SUMS.model_copy(update={"reward": Regex(kind="regex", pattern="^(a|aa)+$")}), no_files)
    sampler = answering(codec, lambda a, b, index: "a" * 100 + "!")
    with pytest.raises(Fatal, match="more than 1 s of CPU time"):
        await sampler_for(codec, sampler).record(
            command(prompts=1, group_size=2, max_tokens=200, task=SUMS), task, lambda: None
        )


async def test_a_replica_that_is_away_for_a_moment_is_waited_for(codec: TextCodec, task: TaskSet) -> None:
    sampler = answering(codec, half_right)
    sampler.failures = [Retryable("no replica", delay_s=0.01) for _ in range(7)]
    record = await sampler_for(codec, sampler).record(command(), task, lambda: None)
    assert len(record.groups) == 5


async def test_patience_ends(codec: TextCodec, task: TaskSet) -> None:
    sampler = answering(codec, half_right)
    sampler.failures = [Retryable("no replica", delay_s=0.02) for _ in range(500)]
    with pytest.raises(Retryable, match="no replica"):
        await sampler_for(codec, sampler, patience_s=0.1).record(command(), task, lambda: None)


async def test_what_serving_refuses_fails_the_run(codec: TextCodec, task: TaskSet) -> None:
    sampler = answering(codec, half_right)
    sampler.failures = [Refused("rank 64 is above 32", code="refused", status=409)]
    with pytest.raises(Fatal, match="rank 64 is above 32"):
        await sampler_for(codec, sampler).record(command(), task, lambda: None)


class Cut(Wrong):
    """The last token's logprob is lost."""

    async def sample(self, base: str, request: SampleRequest) -> Sampled:
        sampled = await self._inner.sample(base, request)
        cut = tuple(replace(s, logprobs=(s.logprobs or ())[:-1]) for s in sampled.sequences)
        return replace(sampled, sequences=cut)


async def test_tokens_without_logprobs_are_never_trained_on(codec: TextCodec, task: TaskSet) -> None:
    with pytest.raises(Fatal, match="cannot be trained on"):
        await sampler_for(codec, Cut(answering(codec, half_right))).record(command(), task, lambda: None)


async def test_a_prompt_longer_than_the_base_takes_is_named(codec: TextCodec, task: TaskSet) -> None:
    small = GroupSampler(answering(codec, half_right), small_base(max_context=32), codec)
    with pytest.raises(Fatal, match=r"prompt \d+\+\d+ has \d+ tokens; with 8 new ones"):
        await small.record(command(), task, lambda: None)


async def test_a_lost_lease_ends_the_work_between_groups(codec: TextCodec, task: TaskSet) -> None:
    class Lost(Exception):
        pass

    sampler, lease = answering(codec, half_right), Lease(after=2, lost=Lost())
    with pytest.raises(Lost):
        await sampler_for(codec, sampler, groups_in_flight=1).record(command(), task, lease.check)
    assert len(sampler.requests) == 2


async def test_no_more_groups_than_allowed_are_in_flight(codec: TextCodec, task: TaskSet) -> None:
    class Slow(Wrong):
        now = most = 0

        async def sample(self, base: str, request: SampleRequest) -> Sampled:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.005)
            self.now -= 1
            return await self._inner.sample(base, request)

    slow = Slow(answering(codec, half_right))
    await sampler_for(codec, slow, groups_in_flight=3).record(command(prompts=9), task, lambda: None)
    assert slow.most == 3
