"""Steps of several policies on one base: slots given away and restored, turns shared, faults kept apart."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest
from mint_schemas.training import KlPenalty, Lora, Optimizer
from safetensors.torch import load

from services.learner.checkpoint import adapter_bytes
from services.learner.one_step import StepOutcome, StepRequest, reference_key, shape_of
from services.learner.optimizer import AdamParams
from services.learner.recipe import StepRows
from services.learner.slots import SlotShape, SlotTable
from services.learner.workbench import Schedule
from shared.bases import DENSE_TARGETS
from shared.errors import Fatal, Retryable
from tests.unit.learner.batches import CALLS, batch, go_on
from tests.unit.learner.jobs import (
    GRPO,
    SFT,
    Attempt,
    Lease,
    bench_of,
    command,
    digests,
    dpo_method,
    grpo_run,
    make_workbench,
    put_groups,
    run,
    trainer_of,
)

ADAPTER = "adapter.safetensors"
# rank, alpha, targets, method and optimizer of each are its own
LORAS = {
    "acme/a": Lora(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj")),
    "acme/b": Lora(rank=2, alpha=16.0, use_rslora=True, target_modules=("k_proj", "gate_proj", "down_proj")),
    "acme/c": Lora(rank=8, alpha=4.0),
}
RATES = {"acme/a": 1e-3, "acme/b": 2e-3, "acme/c": 5e-4}
LOSSES = {"acme/a": "cross_entropy", "acme/b": "grpo", "acme/c": "dpo"}
NAMES = tuple(LORAS)


def _optimizer(policy):
    return Optimizer(learning_rate=RATES[policy], weight_decay=0.01 if policy == "acme/b" else 0.0)


def _request(policy, step, start=None, data=None, check=go_on):
    """A step of one of the three policies, on rows of its own loss."""
    loss = LOSSES[policy]
    rows = batch(loss, (9, 5, 12, 5), seed=10 * step + NAMES.index(policy)) if data is None else data
    made = command(
        step, None, SFT.model_copy(update={"optimizer": _optimizer(policy)}), policy, lora=LORAS[policy],
        fresh_optimizer=False, seed=NAMES.index(policy),
    )  # fmt: skip
    return StepRequest(made, start, None, None, StepRows(rows, CALLS[loss], {}), check)


def _train(bench, names, together, steps=4, starts=None):
    """The files of each policy's last step, restored from files at each."""
    files = dict(starts or {})
    for step in range(1, steps + 1):
        requests = [_request(name, step, files.get(name)) for name in names]
        groups = [requests] if together else [[request] for request in requests]
        outcomes = [outcome for group in groups for outcome in bench.steps(group)]
        for name, outcome in zip(names, outcomes, strict=True):
            assert isinstance(outcome, StepOutcome), outcome
            files[name] = outcome.files
    return files


def _distance(ours, theirs):
    a, b = load(ours[ADAPTER]), load(theirs[ADAPTER])
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_policies_in_time_slices_have_the_files_that_they_have_alone(tiny_directory):
    """Three policies of different rank, alpha, targets, loss and optimizer, 4 steps each: every byte."""
    together = _train(make_workbench(tiny_directory), NAMES, together=False)
    for name in NAMES:
        assert together[name] == _train(make_workbench(tiny_directory), [name], together=False)[name]


@pytest.mark.parametrize("names", [NAMES[:2], NAMES])
def test_policies_in_one_turn_are_within_1e_5_of_alone_after_4_steps(tiny_directory, names):
    together = _train(make_workbench(tiny_directory), names, together=True)
    for name in names:
        alone = _train(make_workbench(tiny_directory), [name], together=False)[name]
        assert _distance(together[name], alone) <= 1e-5
        assert together[name]["state.json"] == alone["state.json"]


def _faulty(fault):
    row, *others = _request("acme/b", 2).rows.data
    length = len(row.input_ids)
    changes = {
        "long": {"input_ids": (5,) * 1025},
        "nan": {"inputs": {**row.inputs, "advantages": (float("nan"),) * length}},
        "vocabulary": {"targets": (49152,) * length},
        "mismatched": {"targets": row.targets[1:]},
    }[fault]
    return [*others, dataclasses.replace(row, **changes)]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("long", "row row0: 1025 tokens; a row has 1 to 1024"),
        ("nan", "row row0: advantages holds a number that is not finite"),
        ("vocabulary", "row row0: token id 49152 is outside the vocabulary of 49152"),
        ("mismatched", "row row0: targets has length 8, the row 9"),
    ],
)
def test_a_bad_step_in_a_turn_fails_with_the_row_and_the_others_have_the_bytes_without_it(
    tiny_directory, fault, reason
):
    """And the base's digest is what it was."""
    bench, absent = make_workbench(tiny_directory), make_workbench(tiny_directory)
    untouched = bench._resident.digest()
    starts = _train(bench, NAMES, together=True, steps=1)
    requests = [_request(name, 2, starts[name], _faulty(fault) if name == "acme/b" else None) for name in NAMES]
    a, b, c = bench.steps(requests)
    assert isinstance(b, Fatal)
    assert reason in str(b)
    wanted = absent.steps([request for request in requests if request.command.policy != "acme/b"])
    assert [a.files, c.files] == [outcome.files for outcome in wanted]
    again = bench.steps([_request("acme/b", 2, starts["acme/b"])])
    assert again[0].files == make_workbench(tiny_directory).steps([_request("acme/b", 2, starts["acme/b"])])[0].files
    assert bench._resident.digest() == untouched


def test_a_loss_that_is_not_finite_fails_its_own_step_in_a_turn(tiny_directory):
    bench, absent = make_workbench(tiny_directory), make_workbench(tiny_directory)
    starts = _train(bench, NAMES, together=False, steps=1)
    row, *others = _request("acme/b", 2).rows.data
    broken = dataclasses.replace(row, inputs={**row.inputs, "old_logprobs": (-1e4,) * len(row.mask),
                                              "advantages": (-1.0,) * len(row.mask)})  # fmt: skip
    requests = [_request(name, 2, starts[name], [*others, broken] if name == "acme/b" else None) for name in NAMES]
    a, b, c = bench.steps(requests)
    assert isinstance(b, Fatal)
    assert "row row0: its loss is" in str(b)
    for outcome, wanted in zip((a, c), absent.steps([requests[0], requests[2]]), strict=True):
        assert _distance(outcome.files, wanted.files) <= 1e-5
    assert bench._slots.find("acme/b", SlotShape(2, 16.0, True, ("down_proj", "gate_proj", "k_proj"))).gradients is None


def test_a_start_that_does_not_fit_or_a_check_that_raises_ends_its_own_step_only(tiny_directory):
    def lose():
        raise Retryable("lease lost")

    bench, absent = make_workbench(tiny_directory), make_workbench(tiny_directory)
    starts = _train(bench, NAMES, together=False, steps=1)
    requests = [
        _request("acme/a", 2, {**starts["acme/a"], ADAPTER: b"torn"}),
        _request("acme/b", 2, starts["acme/b"], check=lose),
        _request("acme/c", 2, starts["acme/c"]),
    ]
    a, b, c = bench.steps(requests)
    assert isinstance(a, Fatal)
    assert isinstance(b, Retryable)
    assert _distance(c.files, absent.steps([requests[2]])[0].files) <= 1e-5


def test_a_pass_that_dies_of_one_policy_is_made_again_for_each_alone(tiny_directory, monkeypatch):
    """Memory that one policy's rows do not leave, say: the others have the bytes that they have alone."""
    bench = make_workbench(tiny_directory, schedule=Schedule("batched"))
    trainer = bench._trainer
    whole = type(trainer).forward_backward_batch

    def out_of_memory(self, works):
        if any(work.slot.policy == "acme/b" for work in works):
            raise RuntimeError("out of memory")
        return whole(self, works)

    monkeypatch.setattr(type(trainer), "forward_backward_batch", out_of_memory)
    a, b, c = bench.steps([_request(name, 1) for name in NAMES])
    assert isinstance(b, RuntimeError)
    assert bench._slots._slots["acme/b"].accumulated == 0
    (alone,) = make_workbench(tiny_directory).steps([_request("acme/c", 1)])
    assert c.files == alone.files
    assert a.adapter_changed


def test_a_step_that_fails_outside_of_its_rows_is_its_own_too(tiny_directory):
    """Rank 33 is more than the learner has; a foreign error while a slot is prepared is no one else's."""
    bench, absent = make_workbench(tiny_directory), make_workbench(tiny_directory)
    large = _request("acme/a", 1)
    large = dataclasses.replace(large, command=large.command.model_copy(update={"lora": Lora(rank=33)}))
    a, b = bench.steps([large, _request("acme/b", 1)])
    assert isinstance(a, Fatal)
    assert "rank 33 is more than this learner's 32" in str(a)
    assert b.files == absent.steps([_request("acme/b", 1)])[0].files


def test_a_step_that_fails_between_its_gradients_and_its_step_gives_its_slot_back(tiny_directory):
    """Step 10 of 9 has no learning rate. The gradients that it left would keep its slot from all others."""
    bench = make_workbench(tiny_directory, capacity=1)
    (failed,) = bench.steps([_request("acme/a", 10)])
    assert isinstance(failed, ValueError)
    (other,) = bench.steps([_request("acme/b", 1)])
    assert other.files == make_workbench(tiny_directory).steps([_request("acme/b", 1)])[0].files


class Gate(Lease):
    """A lease whose first check waits until it is opened."""

    def __init__(self):
        super().__init__()
        self.entered, self.open = threading.Event(), threading.Event()

    def check(self):
        self.entered.set()
        assert self.open.wait(20)


async def _behind_a_turn(job, store, *commands):
    """All of `commands` asked for, in order, while a turn of another policy is held up; their results."""
    gate = Gate()
    holding = asyncio.create_task(job(command(1, policy="acme/gate", lora=Lora(rank=1)), Attempt(store), gate))
    assert await asyncio.to_thread(gate.entered.wait, 20)
    bench, tasks = bench_of(job), []
    for made in commands:
        waiting = len(bench.turns._queue)
        tasks.append(asyncio.create_task(job(made, Attempt(store), Lease())))
        for _ in range(10_000):
            if len(bench.turns._queue) > waiting:
                break
            await asyncio.sleep(0.001)
    gate.open.set()
    await holding
    return await asyncio.gather(*tasks, return_exceptions=True)


async def _first_steps(job, store, *names, **changes):
    return {name: (await run(job, store, 1, policy=name, **changes)).checkpoint for name in names}


@pytest.mark.parametrize(
    ("schedule", "turns"),
    [
        (Schedule("sliced"), [["acme/a"], ["acme/b"], ["acme/c"]]),
        (Schedule("batched"), [["acme/a", "acme/b", "acme/c"]]),
        (Schedule("auto", joint_tokens=10**6), [["acme/a", "acme/b", "acme/c"]]),
        (Schedule("auto", joint_tokens=1), [["acme/a"], ["acme/b"], ["acme/c"]]),
    ],
)
async def test_who_shares_a_turn_is_the_schedules_choice(learner, store, schedule, turns):
    """And whichever it is, each policy's adapter is within 1e-5 of what it is alone."""
    job = learner(schedule=schedule, capacity=4)
    results = await _behind_a_turn(job, store, *(command(1, policy=name, lora=LORAS[name]) for name in NAMES))
    assert trainer_of(job).turns == [["acme/gate"], *turns]
    for name, result in zip(NAMES, results, strict=True):
        alone = await run(learner(), store, 1, policy=name, lora=LORAS[name])
        ours, theirs = [await store.get(it.checkpoint.files[ADAPTER]) for it in (result, alone)]
        assert _distance({ADAPTER: ours}, {ADAPTER: theirs}) <= 1e-5


async def test_a_turn_with_auto_ends_where_its_tokens_do(learner, store):
    """Two policies' rows fit into the bound, three do not."""
    tokens = (await run(learner(), store, 1)).metrics["tokens"]
    job = learner(schedule=Schedule("auto", joint_tokens=int(tokens * 2.5)), capacity=4)
    await _behind_a_turn(job, store, *(command(1, policy=name) for name in NAMES))
    assert trainer_of(job).turns[1:] == [["acme/a", "acme/b"], ["acme/c"]]


async def test_a_turn_has_no_more_policies_than_slots_and_a_reference_takes_one(learner, store):
    parents = await _first_steps(learner(), store, *NAMES)
    method = await dpo_method(store)

    def with_reference(name):
        parent = parents[name]
        return command(1, parent, method, name, run_id="next", reference=parent, fresh_optimizer=True)

    for capacity, asked, turns in (
        (2, [command(1, policy=name) for name in NAMES], [["acme/a", "acme/b"], ["acme/c"]]),
        (3, [with_reference("acme/a"), command(1, policy="acme/b")], [["acme/a", "acme/b"]]),
        (3, [with_reference("acme/a"), with_reference("acme/b")], [["acme/a"], ["acme/b"]]),
        (4, [with_reference("acme/a"), with_reference("acme/b")], [["acme/a", "acme/b"]]),
        (2, [with_reference("acme/a"), with_reference("acme/b")], [["acme/a"], ["acme/b"]]),
    ):
        job = learner(schedule=Schedule("batched"), capacity=capacity)
        results = await _behind_a_turn(job, store, *asked)
        assert [type(result).__name__ for result in results] == ["UpdateResult"] * len(asked)
        assert trainer_of(job).turns[1:] == turns


async def test_one_slot_is_too_few_for_a_step_with_a_reference(learner, store):
    parent = (await run(learner(), store, 1)).checkpoint
    method = await dpo_method(store)
    with pytest.raises(Fatal, match=r"needs 2 slots, .*this learner has 1; set MINT_LEARNER_SLOTS"):
        await run(
            learner(capacity=1), store, 1, start=parent, method=method, run_id="next", reference=parent,
            fresh_optimizer=True,
        )  # fmt: skip


async def test_a_policy_is_never_twice_in_a_turn(learner, store):
    """A redelivery that overlaps with the first delivery: one after the other, and one result."""
    job = learner(schedule=Schedule("batched"), capacity=4)
    first, again, other = await _behind_a_turn(job, store, command(1), command(1), command(1, policy="acme/b"))
    assert trainer_of(job).turns[1:] == [["acme/a"], ["acme/a", "acme/b"]]
    assert digests(first.checkpoint) == digests(again.checkpoint)
    assert again.metrics["optimizer_step"] == 1.0
    assert other.metrics["optimizer_step"] == 1.0


async def test_a_slot_that_is_given_away_while_its_step_waits_is_restored(learner, store):
    """A step that was asked for without files, since the slot had them, finds the slot gone: it comes again
    with the files, and gives the bytes that it gives alone."""
    job = learner(capacity=2)
    start = (await run(job, store, 1)).checkpoint
    assert bench_of(job).holds(command(2, start))
    other, ours = await _behind_a_turn(job, store, command(1, policy="acme/b"), command(2, start))
    assert trainer_of(job).loaded == ["acme/a"]
    alone = await run(learner(), store, 2, start=start)
    assert digests(ours.checkpoint) == digests(alone.checkpoint)
    assert digests(other.checkpoint) == digests((await run(learner(), store, 1, policy="acme/b")).checkpoint)


@pytest.mark.parametrize("gone", ["reference", "both"])
async def test_a_reference_that_is_given_away_while_its_step_waits_is_restored(learner, store, gone):
    method = GRPO.model_copy(update={"kl": KlPenalty(coefficient=0.3)})
    parent = (await run(learner(), store, 1, run_id="parent")).checkpoint
    job = learner(capacity=3)
    bench = bench_of(job)
    changes = {"start": parent, "reference": parent, "fresh_optimizer": True}
    (first,) = await grpo_run(lambda: job, store, method, 1, **changes)
    second = command(
        2, first.checkpoint, method, reference=parent, record=await put_groups(store, seed=2, step=2), record_step=2
    )
    assert bench.holds(second)
    assert bench.holds_reference(second)
    others = [command(1, policy="acme/b"), command(1, policy="acme/d")]
    if gone == "reference":
        # now the policy's own slot is the one used last, and one other policy takes the reference's
        bench._slots.acquire("acme/a", shape_of(second))
        others.pop()
    before = len(trainer_of(job).loaded)
    *_, ours = await _behind_a_turn(job, store, *others, second)
    assert trainer_of(job).loaded[before:] == ["acme/a", reference_key(second)]
    alone = await learner()(second, Attempt(store), Lease())
    assert digests(ours.checkpoint) == digests(alone.checkpoint)


async def test_a_slot_says_what_it_holds_only_while_that_is_true(learner, store):
    job = learner()
    bench = bench_of(job)
    assert not bench.holds(command(1))
    first = (await run(job, store, 1)).checkpoint
    assert bench.holds(command(2, first))
    assert not bench.holds(command(2, first, fresh_optimizer=True))
    assert not bench.holds(command(2, first, policy="acme/b"))
    assert not bench.holds(command(2, first, lora=LORAS["acme/b"]))
    with pytest.raises(Retryable):
        await job(command(2, first), Attempt(store), Lease(checks=0))
    assert not bench.holds(command(2, first))
    second = (await run(job, store, 2, start=first)).checkpoint
    assert bench.holds(command(3, second))
    assert not bench.holds(command(2, first))


async def test_a_step_whose_files_were_not_written_is_made_again_from_its_start(learner, store):
    """The slot is a step ahead of what anyone can know of: it says that it holds nothing."""

    class Full(Attempt):
        async def put(self, name, data):
            raise Retryable("the store is full")

    job = learner()
    first = (await run(job, store, 1)).checkpoint
    with pytest.raises(Retryable, match="store is full"):
        await job(command(2, first), Full(store), Lease())
    assert not bench_of(job).holds(command(2, first))
    again = await run(job, store, 2, start=first)
    assert again.metrics["optimizer_step"] == 2.0
    assert digests(again.checkpoint) == digests((await run(learner(), store, 2, start=first)).checkpoint)


def test_what_is_kept_of_a_step_is_of_that_turn_only(tiny_directory):
    """Two deliveries of a step, the first one's files written after the second's turn: the slot is the
    second's, and the first's checkpoint names no state of it."""
    bench = make_workbench(tiny_directory)
    (first,) = bench.steps([_request("acme/a", 1)])
    (second,) = bench.steps([_request("acme/a", 1)])
    bench.keep(second, "second")
    bench.keep(first, "first")
    assert second.slot.holds == "second"


async def test_steps_that_come_out_of_order_are_applied_in_order(learner, store):
    """SkyRL#2048: offered as 3, 2, 1, with what is committed so far, applied 1, 2, 3; a step whose start
    is not the step before it is refused and changes nothing."""
    job, applied, committed = learner(), [], None
    while len(applied) < 3:
        for step in (3, 2, 1):
            if step in applied:
                continue
            if step == len(applied) + 1:
                result = await run(job, store, step, start=committed)
                applied.append(step)
                committed = result.checkpoint
            else:
                with pytest.raises(Fatal, match=f"step {step} of run run"):
                    await run(job, store, step, start=committed)
    assert applied == [1, 2, 3]
    assert digests(committed) == digests((await run(learner(), store, 1, 2, 3)).checkpoint)
    assert result.metrics["optimizer_step"] == 3.0


def test_a_thousand_policies_through_three_slots_leave_the_base_and_its_memory_as_they_were(rig):
    """NeMo-RL#3696: the digest of the base, and the identity of every buffer: allocated once."""
    bench = rig(capacity=3)
    untouched, table = bench.base.digest(), bench.slots
    shapes = [
        SlotShape(4, 8.0, False, ("q_proj", "v_proj", "down_proj")), SlotShape(1, 2.0, True, ("k_proj",)),
        SlotShape(2, 4.0, False, tuple(sorted(DENSE_TARGETS))),
    ]  # fmt: skip
    buffers = {id(it) for it in table._free}
    addresses = {tensor.data_ptr() for it in table._free for tensor in vars(it).values()}
    assert (len(buffers), len(addresses)) == (3, 12)
    data = batch("cross_entropy", (3,))
    for number in range(1000):
        slot = bench.fresh(f"acme/p{number}", number, shapes[number % 3])
        if number % 50 == 0:
            bench.trainer.forward_backward(slot, data, CALLS["cross_entropy"], go_on)
            bench.trainer.optim_step(slot, AdamParams(1e-2, eps=1e-8))
        assert id(slot.buffers) in buffers
        assert {p.untyped_storage().data_ptr() for p in slot.parameters.values()} <= addresses
    assert len(table.policies) == 3
    assert bench.base.digest() == untouched
    early = bench.fresh("acme/p0", 0, shapes[0])
    assert adapter_bytes(early) == adapter_bytes(rig().fresh("acme/p0", 0, shapes[0]))


def test_a_table_without_slots_is_refused(rig):
    with pytest.raises(ValueError, match="at least one slot, not 0"):
        SlotTable(rig().base, 0, 4)
