"""The job: from an update command to a training checkpoint, redelivered, resumed, interrupted, skipped."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
import torch
from mint_schemas.commands import CheckpointRef
from mint_schemas.training import JsonlMessages, Optimizer, Sft

from services.learner.base_model import ResidentBase
from shared.bases import DENSE_TARGETS
from shared.errors import Fatal, Retryable
from tests.unit.learner.jobs import BASE, GRPO, LORA, SFT, Attempt, Lease, command, digests, put_record, run


async def test_a_restored_run_continues_to_the_same_bytes(learner, store):
    whole = await run(learner(), store, 1, 2, 3, 4)
    half = await run(learner(), store, 1, 2)
    resumed = await run(learner(), store, 3, 4, start=half.checkpoint)
    assert digests(resumed.checkpoint) == digests(whole.checkpoint)
    assert set(digests(whole.checkpoint)) == {"adapter.safetensors", "optimizer.safetensors", "state.json"}
    without = CheckpointRef(
        files={n: r for n, r in half.checkpoint.files.items() if n != "optimizer.safetensors"}, step=2
    )
    with pytest.raises(Fatal, match=r"of step 2 has no optimizer\.safetensors"):
        await run(learner(), store, 3, start=without)
    afresh = await run(learner(), store, 3, start=without, fresh_optimizer=True)
    assert afresh.metrics["optimizer_step"] == 1.0


async def test_a_redelivered_step_is_applied_once(learner, store):
    """SkyRL#2035: the same command again → the same checkpoint, one optimizer step; the slot, which is
    ahead of what was committed, is restored first."""
    job = learner()
    first = await run(job, store, 1)
    lost = await run(job, store, 2, start=first.checkpoint)
    again = await run(job, store, 2, start=first.checkpoint)
    assert digests(again.checkpoint) == digests(lost.checkpoint)
    assert again.metrics["optimizer_step"] == 2.0
    assert digests((await run(job, store, 1)).checkpoint) == digests(first.checkpoint)


async def test_a_step_that_was_interrupted_leaves_no_trace(learner, store):
    job, reference = learner(max_tokens=1), learner(max_tokens=1)
    first = await run(job, store, 1)
    with pytest.raises(Retryable, match="lease lost"):
        await job(command(2, first.checkpoint), Attempt(store), Lease(checks=3))
    after = await run(job, store, 2, start=first.checkpoint)
    start = (await run(reference, store, 1)).checkpoint
    assert digests(after.checkpoint) == digests((await run(reference, store, 2, start=start)).checkpoint)


async def test_a_cancelled_step_answers_at_once_and_the_next_waits_for_its_thread(learner, store):
    class Slow(Lease):
        entered, go_on = threading.Event(), threading.Event()

        def check(self):
            self.entered.set()
            self.go_on.wait(5)

    job, slow = learner(), Slow()
    first = await run(job, store, 1)
    task = asyncio.create_task(job(command(1), Attempt(store), slow))
    await asyncio.to_thread(slow.entered.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 1)
    following = asyncio.create_task(run(job, store, 1))
    await asyncio.sleep(0.1)
    assert not following.done()
    slow.go_on.set()
    assert digests((await following).checkpoint) == digests(first.checkpoint)


async def test_policies_that_take_turns_get_what_they_get_alone(learner, store):
    job, starts = learner(), {}
    for step in (1, 2):
        for policy, seed in (("acme/a", 1), ("acme/b", 2)):
            result = await run(job, store, step, start=starts.get(policy), policy=policy, seed=seed)
            starts[policy] = result.checkpoint
    alone = await run(learner(), store, 1, 2, policy="acme/b", seed=2)
    assert digests(alone.checkpoint) == digests(starts["acme/b"])


async def test_the_first_step_of_a_run_takes_the_adapter_and_leaves_the_moments(learner, store):
    job = learner()
    parent = await run(job, store, 1, 2)
    fresh = await run(job, store, 1, start=parent.checkpoint, fresh_optimizer=True, run_id="next")
    assert fresh.metrics["optimizer_step"] == 1.0
    assert fresh.adapter_changed
    state = json.loads(await store.get(fresh.checkpoint.files["state.json"]))
    assert state["run_id"] == "next"
    assert state["step"] == 1
    assert fresh.checkpoint.files.keys() == parent.checkpoint.files.keys()


async def test_jsonl_chats_are_learned_and_a_broken_line_is_named(learner, store):
    good = b'{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"ho"}]}\n'
    for name, data in (("good", good * 3), ("bad", good + b"{oops\n")):
        method = Sft(
            kind="sft", data=JsonlMessages(kind="jsonl", data=await store.put(name, data)), steps=1, batch_size=2
        )
        if name == "good":
            result = await run(learner(), store, 1, method=method)
            assert result.metrics["rows"] == 2.0
            assert result.metrics["loss"] > 0
        else:
            with pytest.raises(Fatal, match="training data cannot be used: line 2 is not JSON"):
                await run(learner(), store, 1, method=method)


async def test_a_grpo_step_reports_loss_and_mismatch(learner, store):
    result = await run(learner(), store, 1, method=GRPO, record=await put_record(store, [1.0, 0.0]))
    assert result.adapter_changed
    assert not result.skipped
    expected = {"loss", "grad_norm", "tokens", "learning_rate", "ratio_mean", "mismatch_mean", "mismatch_max"}
    assert expected | {"kept_groups", "dropped_groups", "effective_sample_size"} <= result.metrics.keys()


async def test_a_step_with_no_rows_left_is_recorded_as_skipped(learner, store):
    job = learner()
    first = await run(job, store, 1)
    record = await put_record(store, [1.0, 1.0], step=2)
    skipped = await run(job, store, 2, start=first.checkpoint, method=GRPO, record=record)
    assert skipped.skipped
    assert not skipped.adapter_changed
    assert skipped.metrics["dropped_groups"] == 1.0
    before, after = digests(first.checkpoint), digests(skipped.checkpoint)
    assert {n for n in before if before[n] != after[n]} == {"state.json"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": 2}, "of step 2, the command of 1"),
        ({"run_id": "other"}, "of run other"),
        ({"policy": "acme/z"}, "of policy acme/z"),
        ({"base_sha256": "c" * 64}, "of base digest ccc"),
    ],
)
async def test_a_record_of_something_else_is_refused(learner, store, changes, reason):
    with pytest.raises(Fatal, match=reason):
        await run(learner(), store, 1, method=GRPO, record=await put_record(store, [1.0, 0.0], **changes))


async def test_a_step_goes_on_from_its_own_run_and_the_step_before(learner, store):
    first = await run(learner(), store, 1)
    for changes, reason in (
        ({"step": 3}, "step 3 of run run of acme/a cannot go on from step 1 of run run of acme/a"),
        ({"step": 2, "run_id": "other"}, "from step 1 of run run"),
        ({"step": 2, "policy": "acme/z"}, "of acme/z cannot go on from"),
        ({"step": 2, "start": CheckpointRef(files=first.checkpoint.files, step=7)}, "of step 7 says .* of step 1"),
    ):
        with pytest.raises(Fatal, match=reason):
            await run(learner(), store, changes.pop("step"), **{"start": first.checkpoint, **changes})


async def test_what_does_not_fit_is_fatal_with_the_reason(learner, store):
    job = learner()
    first = await run(job, store, 1)
    with pytest.raises(Fatal, match="this learner has no base 'other'; it holds tiny/llama"):
        await run(job, store, 1, base="other")
    with pytest.raises(Fatal, match="names no rollout record"):
        await run(job, store, 1, method=GRPO)
    with pytest.raises(Fatal, match=r"training checkpoint has .*rank=4.*, the run asks for .*rank=2"):
        await run(job, store, 2, start=first.checkpoint, lora=LORA.model_copy(update={"rank": 2}))
    other = learner(base=SimpleNamespace(**{**vars(BASE), "sha256": "c" * 64}))
    with pytest.raises(Fatal, match="is of base bbbb"):
        await run(other, store, 2, start=first.checkpoint)
    garbled = first.checkpoint.files | {"adapter.safetensors": await store.put("torn", b"torn")}
    with pytest.raises(Fatal, match=r"adapter\.safetensors of the training checkpoint cannot be read"):
        await run(job, store, 2, start=CheckpointRef(files=garbled, step=1))
    with pytest.raises(Fatal, match=r"record .* cannot be read"):
        await run(job, store, 1, method=GRPO, record=await store.put("no-record", b"{}"))


async def test_a_step_that_changes_no_byte_fails_loudly(learner, store):
    job = learner()
    first = await run(job, store, 1)
    tiny = SFT.model_copy(update={"optimizer": Optimizer(learning_rate=1e-30)})
    with pytest.raises(Fatal, match="no byte of the adapter changed"):
        await run(job, store, 2, start=first.checkpoint, method=tiny)
    still = SFT.model_copy(update={"optimizer": Optimizer(learning_rate=0.0)})
    assert not (await run(job, store, 2, start=first.checkpoint, method=still)).adapter_changed


async def test_the_probe_is_what_the_policy_says_about_a_fixed_text(learner, store, tiny_directory):
    result = await run(learner(), store, 1, export=True)
    probe = json.loads(await store.get(result.checkpoint.files["probe.json"]))
    assert probe["dtype"] == "float32"
    assert len(probe["logprobs"]) == len(probe["prompt"]) - 1
    module = ResidentBase(tiny_directory, "float32", DENSE_TARGETS).module
    logits = module(input_ids=torch.tensor([probe["prompt"]])).logits[0, :-1]
    base = torch.log_softmax(logits, -1).gather(1, torch.tensor(probe["prompt"][1:])[:, None])[:, 0]
    assert max(abs(a - b) for a, b in zip(probe["logprobs"], base.tolist(), strict=True)) > 1e-4
