"""Killed and resumed is uninterrupted, to the byte; what is missing or does not fit is refused, not guessed."""

from __future__ import annotations

import json

import pytest
import torch
from mint_schemas.commands import CheckpointRef
from mint_schemas.training import KlPenalty, Optimizer, Tis
from safetensors.torch import load, save

from services.learner.checkpoint import Origin, adapter_bytes, dump, identity, restore
from services.learner.optimizer import AdamParams
from services.learner.slots import SlotShape
from shared.errors import Fatal, Retryable
from tests.unit.learner.batches import CALLS, batch, go_on, shake
from tests.unit.learner.jobs import (
    GRPO,
    SFT,
    Attempt,
    Lease,
    command,
    digests,
    dpo_method,
    grpo_run,
    place,
    put_groups,
    run,
)

ORIGIN = Origin("acme/a", "run", "tiny/llama", "b" * 64, 7)
ADAM = AdamParams(learning_rate=1e-2, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5)
FAST = Optimizer(learning_rate=1e-2, schedule="cosine", warmup_steps=2)
KL = KlPenalty(coefficient=0.2)
METHODS = {
    "grpo": GRPO.model_copy(update={"optimizer": FAST}),
    "grpo 2x2": GRPO.model_copy(
        update={"epochs": 2, "minibatches": 2, "steps": 8, "optimizer": FAST, "correction": Tis(kind="tis")}
    ),
    "grpo 2x2 with kl": GRPO.model_copy(
        update={"epochs": 2, "minibatches": 2, "steps": 8, "optimizer": FAST, "kl": KL}
    ),
}


async def _results(kind, job_of, store, *steps, start=None, **changes):
    """Of every step; `changes` of `fresh_optimizer` are for the first of them."""
    if kind in METHODS:
        if "kl" in kind:
            parent = await run(job_of(), store, 1, policy="acme/a", run_id="parent")
            first = start is None
            changes |= {"reference": parent.checkpoint} | ({"fresh_optimizer": True} if first else {})
            start = start or parent.checkpoint
        return await grpo_run(job_of, store, METHODS[kind], *steps, start=start, **changes)
    method = await dpo_method(store) if kind == "dpo" else SFT.model_copy(update={"optimizer": FAST})
    results = []
    for step in steps:
        made = command(step, start, method, **changes)
        changes.pop("fresh_optimizer", None)
        results.append(await job_of()(made, Attempt(store), Lease()))
        start = results[-1].checkpoint
    return results


KINDS = ["sft", "dpo", *METHODS]
STEPS = (1, 2, 3, 4, 5)


@pytest.mark.parametrize("kind", KINDS)
async def test_killed_and_resumed_is_uninterrupted_to_the_byte(learner, store, kind):
    """A learner that holds everything in its slots against a new one for each step; every file of every
    step, the adapter, the moments, lp_old and the state."""
    one = learner()
    whole = await _results(kind, lambda: one, store, *STEPS)
    killed = await _results(kind, learner, store, *STEPS)
    for ours, theirs in zip(whole, killed, strict=True):
        assert digests(ours.checkpoint) == digests(theirs.checkpoint)
        assert ours.metrics == theirs.metrics
        assert ours.adapter_changed
    assert len({digests(result.checkpoint)["adapter.safetensors"] for result in whole}) == len(STEPS)


@pytest.mark.parametrize("kind", KINDS)
async def test_resumed_without_optimizer_state_is_something_else(learner, store, kind):
    """The same step from the same adapter with moments of zero: another adapter, and it says so."""
    whole = await _results(kind, learner, store, 1, 2, 3)
    (without,) = await _results(kind, learner, store, 3, start=whole[1].checkpoint, fresh_optimizer=True)
    ours, theirs = digests(without.checkpoint), digests(whole[2].checkpoint)
    assert ours["adapter.safetensors"] != theirs["adapter.safetensors"]
    assert (without.metrics["optimizer_step"], whole[2].metrics["optimizer_step"]) == (1.0, 3.0)
    assert without.metrics["loss"] == whole[2].metrics["loss"]


@pytest.mark.parametrize("checks", [0, 1, 4])
async def test_a_learner_killed_within_a_step_leaves_the_step_to_the_next(learner, store, checks):
    """Before its first micro-batch, after one, after four of them."""
    method = METHODS["grpo 2x2"]
    whole = await grpo_run(learner, store, method, 1, 2, 3)
    start = whole[0].checkpoint
    record = await put_groups(store, seed=1, step=1)
    with pytest.raises(Retryable, match="lease lost"):
        await learner(max_tokens=1)(
            command(2, start, method, record=record, **place(2, method)), Attempt(store), Lease(checks)
        )
    after = await grpo_run(learner, store, method, 2, 3, start=start)
    assert [digests(result.checkpoint) for result in after] == [digests(result.checkpoint) for result in whole[1:]]


def _stepped(bench, policy="acme/a", seed=1):
    """A slot with moments: one step is behind it."""
    slot = shake(bench.fresh(policy, seed))
    bench.trainer.forward_backward(slot, batch("grpo", (9, 4), seed=1), CALLS["grpo"], go_on)
    bench.trainer.optim_step(slot, ADAM)
    return slot


@pytest.mark.parametrize("packing", [True, False])
def test_accumulated_gradients_survive_save_and_load_to_the_byte(rig, packing):
    """forward_backward, save, load into a slot of another learner, forward_backward, optim_step."""
    first, second = (batch("grpo", (12, 7), seed=seed) for seed in (2, 3))
    bench = rig(packing=packing)
    slot = _stepped(bench)
    bench.trainer.forward_backward(slot, first, CALLS["grpo"], go_on)
    files = bench.trainer.save(slot, ORIGIN, 1)
    assert json.loads(files["state.json"])["accumulated"] == 1

    other = rig(packing=packing)
    _stepped(other, "acme/b", seed=5)
    moved = other.slots.acquire("acme/a", slot.shape)
    other.trainer.load(moved, files, "b" * 64, fresh_optimizer=False)
    assert moved.accumulated == 1
    assert other.trainer.save(moved, ORIGIN, 1) == files
    norms = []
    for trainer, its in ((bench.trainer, slot), (other.trainer, moved)):
        trainer.forward_backward(its, second, CALLS["grpo"], go_on)
        assert its.accumulated == 2
        norms.append(trainer.optim_step(its, ADAM))
    assert norms[0] == norms[1]
    assert other.trainer.save(moved, ORIGIN, 2) == bench.trainer.save(slot, ORIGIN, 2)

    without = rig(packing=packing)
    lost = without.slots.acquire("acme/a", slot.shape)
    without.trainer.load(lost, files, "b" * 64, fresh_optimizer=True)
    assert (lost.accumulated, lost.optimizer.step_count) == (0, 0)
    assert adapter_bytes(lost) != adapter_bytes(slot)


def test_a_checkpoint_has_gradients_only_where_some_are_accumulated(rig):
    bench = rig()
    slot = _stepped(bench)
    assert set(dump(slot, ORIGIN, 1)) == {"adapter.safetensors", "optimizer.safetensors", "state.json"}
    bench.trainer.forward_backward(slot, batch("grpo", (9,)), CALLS["grpo"], go_on)
    files = dump(slot, ORIGIN, 1)
    assert set(files) == {"adapter.safetensors", "gradients.safetensors", "optimizer.safetensors", "state.json"}
    assert load(files["gradients.safetensors"]).keys() == slot.parameters.keys()


def test_loading_replaces_everything_that_the_slot_had(rig):
    """Gradients and moments of whatever was in the slot before do not reach the next step."""
    bench = rig()
    clean = dump(bench.fresh("acme/a", seed=3), ORIGIN, 0)
    slot = _stepped(bench)
    bench.trainer.forward_backward(slot, batch("grpo", (9,)), CALLS["grpo"], go_on)
    bench.trainer.load(slot, clean, "b" * 64, fresh_optimizer=False)
    assert dump(slot, ORIGIN, 0) == clean
    assert slot.gradients is None
    with pytest.raises(Fatal, match="needs a forward_backward"):
        bench.trainer.optim_step(slot, ADAM)


def _cut(data):
    tensors = load(data)
    tensors.popitem()
    return save(tensors)


def _transposed(data):
    return save({name: tensor.t().contiguous() for name, tensor in load(data).items()})


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("adapter.safetensors", _cut, r"adapter\.safetensors of the training checkpoint does not fit the slot at"),
        ("adapter.safetensors", _transposed, r"adapter\.safetensors of the training checkpoint does not fit"),
        ("optimizer.safetensors", _cut, r"optimizer\.safetensors of the training checkpoint does not fit"),
        ("optimizer.safetensors", lambda data: data[:-1], r"optimizer\.safetensors .* cannot be read"),
        ("gradients.safetensors", _cut, r"gradients\.safetensors of the training checkpoint does not fit"),
        ("gradients.safetensors", lambda data: None, r"gradients\.safetensors .* cannot be read"),
        ("state.json", lambda data: b"{}", r"state\.json of the training checkpoint cannot be read"),
        ("state.json", lambda data: data.replace(b'"rank":4', b'"rank":2'), "they must be equal"),
        ("state.json", lambda data: data.replace(b'"alpha":8.0', b'"alpha":4.0'), "they must be equal"),
        ("state.json", lambda data: data.replace(b"bbbb", b"cccc", 1), "is of base ccccbbbb"),
        ("state.json", lambda data: data.replace(b'"format":1', b'"format":2'), "reads format 1"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused_and_change_nothing(rig, file, change, reason):
    bench = rig()
    slot = _stepped(bench)
    bench.trainer.forward_backward(slot, batch("grpo", (9,)), CALLS["grpo"], go_on)
    files = dump(slot, ORIGIN, 1)
    changed = change(files[file])
    broken = {**files, file: changed} if changed is not None else {n: d for n, d in files.items() if n != file}
    target = _stepped(bench, "acme/b", seed=6)
    bench.trainer.forward_backward(target, batch("grpo", (7,)), CALLS["grpo"], go_on)
    held = dump(target, ORIGIN, 5)
    with pytest.raises(Fatal, match=reason):
        restore(target, broken, "b" * 64, fresh_optimizer=False)
    assert dump(target, ORIGIN, 5) == held


def test_equal_values_are_equal_bytes_and_a_slot_may_be_any_part_of_its_buffers(rig):
    """Rank 4 in buffers for rank 16: nothing behind the adapter is read, written or saved."""
    bench = rig(capacity=1)
    large = bench.fresh("acme/large", shape=SlotShape(16, 8.0, False, ("q_proj", "v_proj", "down_proj")))
    buffers = large.buffers
    for tensor in (buffers.parameters, buffers.first, buffers.second, buffers.gradients):
        tensor.fill_(float("nan"))
    slot = _stepped(bench)
    assert slot.buffers is buffers
    assert dump(slot, ORIGIN, 1) == dump(_stepped(rig()), ORIGIN, 1)
    assert torch.isnan(buffers.parameters[slot.size :]).all()
    assert torch.isnan(buffers.gradients[slot.size :]).all()


async def test_what_a_checkpoint_is_called_is_all_that_it_restores(learner, store):
    """Its identity: any file but the probe."""
    result = await run(learner(), store, 1, export=True)
    files = result.checkpoint.files
    assert "probe.json" in files
    bare = CheckpointRef(files={n: r for n, r in files.items() if n != "probe.json"}, step=1)
    assert identity(bare) == identity(result.checkpoint)
    other = await store.put("other", b"other")
    for name in bare.files:
        assert identity(CheckpointRef(files={**files, name: other}, step=1)) != identity(bare)
