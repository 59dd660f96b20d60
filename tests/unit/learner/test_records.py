"""Several optimizer steps of one rollout record: lp_old is from before the first, the reference stands still."""

from __future__ import annotations

from itertools import chain, compress

import pytest
import torch
from mint_schemas.commands import CheckpointRef
from mint_schemas.training import KlPenalty, Optimizer
from safetensors.torch import load, save

from services.learner.grpo import grpo_rows
from services.learner.one_step import shape_of
from shared.errors import Fatal
from shared.rl.record import RolloutRecord
from shared.rl.seeds import derive_seed
from tests.unit.learner.batches import go_on
from tests.unit.learner.jobs import (
    GRPO,
    Attempt,
    Lease,
    bench_of,
    command,
    digests,
    grpo_run,
    place,
    put_groups,
    put_record,
    run,
    trainer_of,
)

FILE = "old_logprobs.safetensors"
METHOD = GRPO.model_copy(
    update={"epochs": 2, "minibatches": 2, "steps": 8, "optimizer": Optimizer(learning_rate=2e-2), "temperature": 0.6}
)
STEPS = (1, 2, 3, 4)


async def _record(store, step=1):
    return RolloutRecord.from_bytes(await store.get(await put_groups(store, seed=step, step=step)))


async def _whole(store, step=1):
    """Every row of the record, by name."""
    rows = grpo_rows(await _record(store, step), METHOD)
    return {row.name: row for row in rows.record}


async def _logprobs(learner, store, rows, start, temperature=1.0):
    """What a policy says of rows: a fresh one of the command's seed, or a checkpoint's."""
    bench = bench_of(learner())
    made = command(1)
    slot = bench._slots.acquire("acme/a", shape_of(made))
    if start is None:
        slot.initialise(derive_seed(made.seed, "adapter-init"))
    else:
        files = {name: await store.get(ref) for name, ref in start.files.items()}
        bench._trainer.load(slot, files, "b" * 64, fresh_optimizer=True)
    found = bench._trainer.forward(slot, list(rows.values()), temperature, go_on)
    return dict(zip(rows, found, strict=True))


def test_the_steps_of_a_run_and_the_parts_of_its_records():
    assert [tuple(place(step, METHOD).values()) for step in range(1, 9)] == [
        (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (5, 0, 0), (5, 0, 1), (5, 1, 0), (5, 1, 1),
    ]  # fmt: skip


async def test_lp_old_is_from_before_the_records_first_step_in_all_of_them(learner, store):
    """Two records of 4 steps. Each step of a record has the lp_old of its first; the second record's is
    the policy's after step 4, not the first record's."""
    job = learner()
    results = await grpo_run(lambda: job, store, METHOD, *range(1, 9))
    seen = trainer_of(job).seen
    assert len(seen) == 8
    for first, start in ((1, None), (5, results[3].checkpoint)):
        rows = await _whole(store, first)
        wanted = await _logprobs(learner, store, rows, start)
        files = [results[step - 1].checkpoint.files for step in range(first, first + 4)]
        assert [FILE in named for named in files] == [True, True, True, False]
        assert len({named[FILE].sha256 for named in files[:3]}) == 1
        (kept,) = load(await store.get(files[0][FILE])).values()
        assert kept.tolist() == [lp for name, row in rows.items() for lp in compress(wanted[name], row.mask)]
        for data in seen[first - 1 : first + 3]:
            assert len(data) > 0
            for row in data:
                assert list(row.inputs["old_logprobs"]) == wanted[row.name]
    after = await _logprobs(learner, store, await _whole(store), results[3].checkpoint)
    before = await _logprobs(learner, store, await _whole(store), None)
    assert max(abs(a - b) for name in before for a, b in zip(after[name], before[name], strict=True)) > 1e-2


async def test_the_temperature_of_the_record_is_that_of_its_lp_old(learner, store):
    reference = await put_groups(store, seed=1, step=1, temperature=0.6)
    job = learner()
    await job(command(1, None, METHOD, record=reference, **place(1, METHOD)), Attempt(store), Lease())
    wanted = await _logprobs(learner, store, await _whole(store), None, temperature=0.6)
    for row in trainer_of(job).seen[0]:
        assert list(row.inputs["old_logprobs"]) == wanted[row.name]


async def test_the_minibatches_of_an_epoch_are_the_record(store):
    """Each row once an epoch, in another order the next; a record of 4 groups in 2 × 2 and 5 in 3."""
    for groups, minibatches in ((4, 2), (5, 3)):
        method = METHOD.model_copy(update={"minibatches": minibatches})
        record = RolloutRecord.from_bytes(await store.get(await put_groups(store, groups)))
        epochs = []
        for epoch in (0, 1):
            parts = [[d.name for d in grpo_rows(record, method, epoch, m, 7).data] for m in range(minibatches)]
            assert all(parts)
            epochs.append(parts)
            assert sorted(chain.from_iterable(parts)) == sorted(row.name for row in grpo_rows(record, method).record)
        assert epochs[0] != epochs[1]


async def test_one_step_a_record_needs_no_lp_old(learner, store):
    job = learner()
    (result,) = await grpo_run(lambda: job, store, GRPO, 1)
    assert FILE not in result.checkpoint.files
    assert all("old_logprobs" not in row.inputs for row in trainer_of(job).seen[0])


async def test_a_later_step_moves_away_from_lp_old_until_the_clip_holds_it(learner, store):
    """In its first step the ratio is 1 and nothing is held; after it, at this rate, some of it is."""
    method = METHOD.model_copy(update={"optimizer": Optimizer(learning_rate=0.1), "epochs": 4, "minibatches": 1})
    results = await grpo_run(learner, store, method, *STEPS)
    assert results[0].metrics["clip_share"] == 0.0
    assert max(result.metrics["clip_share"] for result in results[1:]) > 0.0
    assert len({result.metrics["mismatch_mean"] for result in results}) == 1
    assert len({result.metrics["ratio_mean"] for result in results}) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: None, f"the training checkpoint has no {FILE}; a record's later steps need that of its first"),
        (lambda data: b"torn", f"{FILE} of the training checkpoint cannot be read"),
        (lambda data: save({"other": torch.zeros(3)}), f"{FILE} of the training checkpoint cannot be read"),
        (lambda data: save({"logprobs": torch.zeros(3)}), f"{FILE} has 3 logprobs, the record .* of another record"),
    ],
)
async def test_lp_old_that_is_missing_or_of_another_record_is_fatal(learner, store, change, reason):
    """It is never computed anew from a policy that has moved."""
    job = learner()
    (first,) = await grpo_run(lambda: job, store, METHOD, 1)
    changed = change(b"")
    files = {name: ref for name, ref in first.checkpoint.files.items() if name != FILE}
    if changed is not None:
        files[FILE] = await store.put(f"changed-{len(changed)}", changed)
    for its in (job, learner()):
        with pytest.raises(Fatal, match=reason):
            await grpo_run(lambda its=its: its, store, METHOD, 2, start=CheckpointRef(files=files, step=1))


async def test_a_slot_that_is_given_away_between_the_steps_of_a_record_changes_nothing(learner, store):
    """One slot for two policies: each step finds the other's adapter in it."""
    alone = await grpo_run(learner, store, METHOD, *STEPS)
    job, start, kept = learner(capacity=1), None, []
    for step in STEPS:
        (result,) = await grpo_run(lambda: job, store, METHOD, step, start=start)
        start = result.checkpoint
        kept.append(digests(start))
        await run(job, store, 1, policy="acme/b", seed=step)
    assert kept == [digests(result.checkpoint) for result in alone]
    assert trainer_of(job).loaded == ["acme/a"] * 3


@pytest.mark.parametrize("kind", ["base", "parent"])
async def test_the_reference_stands_still_while_the_policy_trains(learner, store, kind):
    """Over two records: every row's ref_logprobs are the starting revision's (the base's, adapter off,
    where there is none), whatever the policy has become, and its slot keeps its bytes."""
    job, method = learner(), METHOD.model_copy(update={"kl": KlPenalty(coefficient=0.5)})
    changes, parent = {}, None
    if kind == "parent":
        parent = (await run(job, store, 1, 2, run_id="parent")).checkpoint
        changes = {"start": parent, "reference": parent, "fresh_optimizer": True}
    before = len(trainer_of(job).seen)
    results = await grpo_run(lambda: job, store, method, *range(1, 7), **changes)
    for step, data in enumerate(trainer_of(job).seen[before:], start=1):
        rows = await _whole(store, place(step, method)["record_step"])
        if parent is None:
            found = bench_of(learner())._trainer.forward(None, list(rows.values()), 1.0, go_on)
            wanted = dict(zip(rows, found, strict=True))
        else:
            wanted = await _logprobs(learner, store, rows, parent)
        assert data
        for row in data:
            assert row.inputs["ref_logprobs"] == pytest.approx(wanted[row.name], abs=1e-5)
    kls = [result.metrics["kl"] for result in results]
    assert kls[0] == pytest.approx(0.0, abs=1e-9)
    assert all(kl > 1e-6 for kl in kls[1:])
    if parent is not None:
        assert trainer_of(job).loaded.count("acme/a (reference)") == 1


async def test_a_record_whose_groups_are_all_alike_is_skipped_and_leaves_no_lp_old(learner, store):
    record = await put_record(store, [1.0, 1.0])
    job, start = learner(), None
    for step in (1, 2):
        made = command(step, start, METHOD, record=record, **place(step, METHOD))
        result = await job(made, Attempt(store), Lease())
        assert result.skipped
        assert FILE not in result.checkpoint.files
        assert (
            start is None or digests(start)["adapter.safetensors"] == digests(result.checkpoint)["adapter.safetensors"]
        )
        start = result.checkpoint


async def test_a_minibatch_without_rows_hands_lp_old_on_to_the_next_epoch(learner, store):
    """One group in two minibatches: every other step is skipped, and the second epoch still has lp_old."""
    record = await put_groups(store, groups=1)
    job, start, results = learner(), None, []
    for step in STEPS:
        made = command(step, start, METHOD, record=record, **place(step, METHOD))
        results.append(await job(made, Attempt(store), Lease()))
        start = results[-1].checkpoint
    assert [result.skipped for result in results] == [False, True, False, True]
    assert len({result.checkpoint.files[FILE].sha256 for result in results[:3]}) == 1
    assert FILE not in results[3].checkpoint.files
    first, third = trainer_of(job).seen
    assert [row.inputs["old_logprobs"] for row in first] == [row.inputs["old_logprobs"] for row in third]
