"""What bad input gets: a reason for people that says what is allowed, and all of them at once."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from services.catalog import aliases
from services.catalog.readiness import Readiness
from services.catalog.validate import Validator
from shared.store import keys
from shared.store.memory import MemoryStore
from shared.tasks import RewardSettings, TaskSet
from tests.catalog_flows import dpo, with_method
from tests.catalog_kit import Lab, bases_by_name, evaluation, grpo, make_base, sft

BASES = bases_by_name(make_base(), make_base("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def validator(lab: Lab, store: MemoryStore) -> Validator:
    return Validator(lab.database, store, BASES, lambda: Readiness(max_rank={"tiny/llama": 16}))


def _with(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split(".")
    at = body
    for parent in parents:
        at = at[parent]
    at[last] = value
    return body


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (_with(sft(), "base", "tiny/lama"), "did you mean tiny/llama?); known are HuggingFaceTB/SmolLM2-135M-Instruct"),
        (_with(sft(), "method.kind", "ppo"), "'sft', 'dpo', 'grpo'"),
        (_with(grpo(), "method.task.kind", "chess"), "'arithmetic', 'jsonl'"),
        (_with(sft(), "lora", {"target_modules": ["q_proj", "lm_head"]}), "lm_head cannot be trained on tiny/llama"),
        (_with(sft(), "lora", {"rank": 64}), "lora.rank: 64 is above the maximum of 16"),
        (_with(sft(), "method.steps", 0), "greater than or equal to 1"),
        (_with(grpo(), "method.group_size", 0), "greater than or equal to 2"),
        (_with(sft(), "method.optimizer", {"learning_rate": math.nan}), "finite number"),
        (_with(sft(), "method.optimizer", {"learning_rate": "NaN"}), "Input should be a valid number (got 'NaN')"),
        (_with(sft(), "method.optimizer", {"learning_rate": False}), "Input should be a valid number (got False)"),
        (_with(sft(), "method.batch_size", "12"), "Input should be a valid integer (got '12')"),
        (_with(grpo(), "method.drop_zero_variance", 0), "Input should be a valid boolean (got 0)"),
        (sft("acme/../etc"), "each part is 1 to 63 of a-z"),
        (sft("Acme/adder"), "each part is 1 to 63 of a-z"),
        (sft("acme/" + "a" * 300), "each part is 1 to 63 of a-z"),
        (sft("tiny/mine"), "owner part of a base model's name"),
        (sft("huggingfacetb/mine"), "owner part of a base model's name"),
        (sft("HuggingFaceTB/mine"), "owner part of a base model's name"),
        (sft(parent="acme/adder@9"), "parent acme/adder@9 does not exist"),
        (sft(parent="other/adder@1"), "belongs to tenant other"),
        (sft(promote_to="LIVE!"), "is not an alias name"),
        (sft(colour="red"), "colour"),
        (_with(grpo(), "method.max_tokens", 5000), "does not fit the context of tiny/llama, which is 2048 tokens"),
        (
            _with(sft(steps=5), "method.optimizer", {"learning_rate": 1e-3, "warmup_steps": 6}),
            "method.optimizer.warmup_steps: 6 is above the run's 5 steps",
        ),
        (
            with_method(grpo(steps=12, evaluation=evaluation(), eval_every=6), epochs=2, minibatches=2),
            "eval_every: 6 is no multiple of 4; with 2 epochs of 2 minibatches every rollout record gets 4 steps",
        ),
        (
            sft(steps=5, evaluation=evaluation(), eval_every=6, stop_when={"target_score": 0.5}),
            "eval_every: 6 is above the run's 5 steps, so no revision would be scored on the way; allowed are 1 to 5",
        ),
        (grpo(steps=2, evaluation=evaluation(), eval_every=3), "eval_every: 3 is above the run's 2 steps"),
        (with_method(grpo(steps=6), epochs=2, minibatches=2), "steps must be a multiple of 4"),
        (sft(eval_every=2), "eval_every needs an evaluation"),
        (sft(evaluation=evaluation(), promote="best"), "promote: best needs eval_every"),
        (sft(evaluation=evaluation(), stop_when={"target_score": 0.5}), "stop_when on scores needs eval_every"),
        (sft(stop_when={}), "name at least one of target_score, no_progress_steps, max_tokens"),
        (with_method(dpo(), max_length=5000), "method.max_length: 5000 does not fit the context of tiny/llama"),
        (dpo(), "there is no data at data/acme/pairs"),
        (_with(grpo(), "method.task", {"kind": "arithmetic", "reward": {"kind": "regex", "pattern": "("}}), "compile"),
    ],
)
async def test_refusals_say_what_is_allowed(validator: Validator, body: dict[str, Any], says: str) -> None:
    checked = await validator.check(body)
    assert checked.request is None
    assert says in "; ".join(checked.errors), checked.errors


async def test_all_reasons_come_at_once(validator: Validator) -> None:
    body = _with(_with(grpo("tiny/mine", steps=0), "method.group_size", 1), "base", "nothing")
    assert len((await validator.check(body)).errors) == 4


async def test_a_valid_request_is_resolved(validator: Validator) -> None:
    checked = await validator.check(sft(evaluation=evaluation()))
    assert checked.errors == []
    assert checked.scoring is not None
    assert checked.resolved["parent"] is None
    assert checked.resolved["lora"]["rank"] == 8
    assert checked.resolved["held_out_items"] == 16
    assert checked.resolved["demonstrations"] == 8000


async def test_a_caller_may_not_train_for_another_tenant(validator: Validator) -> None:
    assert (await validator.check(sft(), "acme")).errors == []
    assert "is not of your tenant" in (await validator.check(sft(), "shop")).errors[0]


async def _data(store: MemoryStore, lines: list[str], tenant: str = "acme") -> dict[str, Any]:
    data = "\n".join(lines).encode()
    ref = await store.put(keys.data(tenant, hashlib.sha256(data).hexdigest()), data)
    return ref.model_dump()


def _jsonl_sft(ref: dict[str, Any]) -> dict[str, Any]:
    return _with(sft(), "method.data", {"kind": "jsonl", "data": ref})


CHAT = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})


async def test_own_data_is_read_and_counted(validator: Validator, store: MemoryStore) -> None:
    checked = await validator.check(_jsonl_sft(await _data(store, [CHAT, CHAT])))
    assert checked.errors == []
    assert checked.resolved["demonstrations"] == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ref: {**ref, "key": "data/acme/nothing"}, "there is no data at data/acme/nothing"),
        (lambda ref: {**ref, "sha256": "0" * 64}, "has another sha256 than the reference"),
        (lambda ref: {**ref, "size": 3}, "the reference says 3"),
        (lambda ref: {**ref, "key": "data/other/x"}, "is no data of tenant acme"),
        (lambda ref: {**ref, "key": "attempts/x/y"}, "is no data of tenant acme"),
        (lambda ref: {**ref, "key": f"data/acme/../other/{ref['sha256']}"}, "is no data of tenant acme"),
    ],
)
async def test_a_reference_that_is_wrong_is_named(
    validator: Validator, store: MemoryStore, change: Callable[[dict[str, Any]], dict[str, Any]], says: str
) -> None:
    body = _jsonl_sft(change(await _data(store, [CHAT])))
    assert says in "; ".join((await validator.check(body)).errors)


PAIR = json.dumps({"prompt": "1+1", "chosen": "2", "rejected": "3"})


async def test_pairs_are_read_and_counted(validator: Validator, store: MemoryStore) -> None:
    body = _with(dpo(), "method.data", {"kind": "jsonl", "data": await _data(store, [PAIR, PAIR, PAIR])})
    checked = await validator.check(body)
    assert checked.errors == []
    assert checked.resolved["pairs"] == 3


async def test_a_broken_pair_is_numbered(validator: Validator, store: MemoryStore) -> None:
    half = json.dumps({"prompt": "1+1", "chosen": "2"})
    body = _with(dpo(), "method.data", {"kind": "jsonl", "data": await _data(store, [PAIR, half])})
    (error,) = (await validator.check(body)).errors
    assert error.startswith("method: line 2")


def _rewarded(reward: dict[str, Any]) -> dict[str, Any]:
    return _with(grpo(), "method.task", {"kind": "arithmetic", "reward": reward})


async def test_webhooks_are_called_on_allowed_hosts_only(lab: Lab, store: MemoryStore) -> None:
    rewards = RewardSettings.parsed("judge.example")
    validator = Validator(lab.database, store, BASES, Readiness, rewards)
    allowed = _rewarded({"kind": "webhook", "url": "https://judge.example/score"})
    assert (await validator.check(allowed)).errors == []
    other = _rewarded({"kind": "webhook", "url": "https://judge.example.org/score"})
    for body in (other, grpo(evaluation={"task": other["method"]["task"]})):
        (error,) = (await validator.check(body)).errors
        assert "judge.example.org" in error


@pytest.mark.parametrize("url", ["http://[v1.a]/", "http://judge.example\n/", "http://judge.example\0/"])
async def test_a_webhook_without_an_address_is_refused(validator: Validator, url: str) -> None:
    (error,) = (await validator.check(_rewarded({"kind": "webhook", "url": url}))).errors
    assert "url" in error


async def test_prompts_are_drawn_off_the_loop(validator: Validator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator may take seconds for one."""
    threads = []
    drawn = TaskSet.step_items

    def step_items(task: TaskSet, seed: int, step: int, n: int) -> Any:
        threads.append(threading.current_thread())
        return drawn(task, seed, step, n)

    monkeypatch.setattr(TaskSet, "step_items", step_items)
    assert (await validator.check(grpo())).errors == []
    assert threads
    assert threading.main_thread() not in threads


async def test_demonstrations_need_no_reward(validator: Validator) -> None:
    task = {"kind": "arithmetic", "reward": {"kind": "webhook", "url": "http://judge.example/"}}
    body = _with(sft(), "method.data", {"kind": "task", "task": task})
    assert (await validator.check(body)).errors == []


async def test_what_is_not_installed_is_refused_at_once(validator: Validator) -> None:
    (error,) = (await validator.check(_rewarded({"kind": "plugin", "name": "nobody-has-this"}))).errors
    assert error.startswith("method: ")
    assert "nobody-has-this" in error


async def test_every_record_may_be_scored_on_the_way(validator: Validator) -> None:
    body = with_method(grpo(steps=12, evaluation=evaluation(), eval_every=4), epochs=2, minibatches=2)
    assert (await validator.check(body)).errors == []


async def test_a_broken_line_is_numbered(validator: Validator, store: MemoryStore) -> None:
    body = _jsonl_sft(await _data(store, [CHAT, CHAT, "{half"]))
    (error,) = (await validator.check(body)).errors
    assert error.startswith("method: line 3 is not JSON")


async def test_prompts_without_held_out_ones_cannot_be_evaluated(validator: Validator, store: MemoryStore) -> None:
    ref = await _data(store, [json.dumps({"prompt": "1+1", "answer": "2"})])
    task = {"kind": "jsonl", "data": ref, "held_out": 0}
    body = _with(grpo(evaluation={"task": task}), "method.task", task)
    (error,) = (await validator.check(body)).errors
    assert error.startswith("evaluation: the task has no held-out items")


async def test_lora_is_inherited_or_must_agree(lab: Lab, validator: Validator) -> None:
    lab.finish(lab.request(sft(steps=1, lora={"rank": 4, "alpha": 16})))
    inherited = await validator.check(sft())
    assert inherited.resolved["lora"]["rank"] == 4
    assert inherited.resolved["parent"] == "acme/adder@1"
    assert (await validator.check(sft(lora={"rank": 4}))).errors == []
    assert (await validator.check(sft(lora={"alpha": 16.0, "rank": 4}))).resolved["lora"]["alpha"] == 16.0
    (error,) = (await validator.check(sft(lora={"rank": 8}))).errors
    assert "acme/adder@1 has rank=4 (asked: 8)" in error


async def test_an_inherited_rank_is_held_against_the_engines_too(lab: Lab, store: MemoryStore) -> None:
    lab.finish(lab.request(sft(steps=1, lora={"rank": 16})))
    small = Validator(lab.database, store, BASES, lambda: Readiness(max_rank={"tiny/llama": 8}))
    assert (await small.check(sft())).errors == ["lora.rank: 16 is above the maximum of 8 for tiny/llama"]


async def test_what_is_sampled_must_fit_the_engines_context(lab: Lab, store: MemoryStore) -> None:
    small = Validator(lab.database, store, BASES, lambda: Readiness(max_context={"tiny/llama": 256}))
    (error,) = (await small.check(_with(grpo(), "method.max_tokens", 300))).errors
    assert error == "method.max_tokens: 300 does not fit the context of tiny/llama, which is 256 tokens here"


async def test_a_parent_or_policy_of_another_base_is_refused(lab: Lab, validator: Validator) -> None:
    lab.finish(lab.request(sft(steps=1)))
    other = "HuggingFaceTB/SmolLM2-135M-Instruct"
    (error,) = (await validator.check(sft(base=other))).errors
    assert error == (
        "policy acme/adder is on base model tiny/llama, the request names "
        "HuggingFaceTB/SmolLM2-135M-Instruct; name its base, or train under another policy name"
    )
    (error,) = (await validator.check(sft("acme/new", base=other, parent="acme/adder@1"))).errors
    assert "parent acme/adder@1 is on base model tiny/llama" in error
    assert (await validator.check(sft("acme/new", parent="acme/adder:live"))).resolved["parent"] == "acme/adder@1"


async def test_a_queued_run_whose_parent_changed_shape_fails_when_it_would_begin(lab: Lab) -> None:
    """`live` may move to another shape while a run is queued; the run then fails with the reason."""
    lab.finish(lab.request(sft(steps=1, lora={"rank": 4}, promote_to=None)))
    first = lab.request(sft(steps=1, lora={"rank": 8}, promote_to=None))
    queued = lab.request(sft(steps=1, lora={"rank": 8}))
    move = aliases.Move("acme/adder", "live", "acme/adder@1", "ann", "manual")
    lab.database.write_now(aliases.move, move, "tiny-llama", lab.clock())
    lab.finish(first)
    run = lab.run(queued)
    assert (run.state, run.active_policy) == ("failed", None)
    assert "acme/adder@1 has rank=4 (asked: 8)" in run.outcome
