"""Several policies in one backward pass: each gets what it gets alone, and what one does to no other."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from services.learner.checkpoint import adapter_bytes
from services.learner.heads import LossCall
from services.learner.optimizer import AdamParams
from services.learner.slots import SlotShape
from services.learner.trainer import ForwardBackward, Work
from shared.bases import DENSE_TARGETS
from shared.errors import Fatal, MintError, Retryable
from tests.unit.learner.batches import CALLS, batch, go_on, relative_l2, shake

# rank, alpha, targets, method and optimizer of each are its own
POLICIES = {
    "acme/a": (
        SlotShape(4, 8.0, False, ("q_proj", "v_proj", "down_proj")), "cross_entropy", AdamParams(1e-3, eps=1e-8),
    ),
    "acme/b": (
        SlotShape(2, 16.0, True, ("k_proj", "gate_proj")), "grpo",
        AdamParams(2e-3, 0.8, 0.999, 1e-8, weight_decay=0.01, grad_clip_norm=0.05),
    ),
    "acme/c": (
        SlotShape(8, 4.0, False, tuple(sorted(DENSE_TARGETS))), "dpo", AdamParams(5e-4, 0.9, 0.99, 1e-7),
    ),
}  # fmt: skip
LENGTHS = {"acme/a": (12, 7, 15, 4), "acme/b": (7, 7, 21), "acme/c": (5, 9, 12, 12)}
NAMES = tuple(POLICIES)


def _work(slot, step, **changes):
    _, loss, _ = POLICIES[slot.policy]
    data = batch(loss, LENGTHS[slot.policy], seed=100 * step + NAMES.index(slot.policy))
    return dataclasses.replace(Work(slot, data, CALLS[loss], go_on), **changes)


def _slots(bench, names=NAMES):
    """Adapters whose B is not zero, so that every tensor has a gradient from the first step on."""
    return [shake(bench.fresh(name, NAMES.index(name), POLICIES[name][0])) for name in names]


def _train(bench, names, together, steps=4):
    slots = _slots(bench, names)
    for step in range(steps):
        works = [_work(slot, step) for slot in slots]
        if together:
            assert all(isinstance(a, ForwardBackward) for a in bench.trainer.forward_backward_batch(works))
        else:
            for work in works:
                bench.trainer.forward_backward(work.slot, work.data, work.call, go_on)
        for slot in slots:
            bench.trainer.optim_step(slot, POLICIES[slot.policy][2])
    return {slot.policy: (adapter_bytes(slot), slot.flat.detach().clone()) for slot in slots}


@pytest.mark.parametrize("packing", [True, False])
def test_three_policies_in_time_slices_get_the_bytes_that_they_get_alone(rig, packing):
    """fb(A) fb(B) fb(C) step(A) step(B) step(C), four times."""
    together = _train(rig(packing=packing), NAMES, together=False)
    for name in NAMES:
        assert together[name][0] == _train(rig(packing=packing), [name], together=False)[name][0]


@pytest.mark.parametrize(
    ("names", "packing", "max_tokens"),
    [(NAMES[:2], True, 4096), (NAMES, True, 4096), (NAMES, True, 40), (NAMES, False, 4096), (NAMES, False, 1)],
)
def test_policies_in_one_pass_are_within_1e_5_of_alone_after_4_steps(rig, names, packing, max_tokens):
    """fp32; the largest difference of any number of the adapter, whose steps moved it far more."""
    together = _train(rig("float32", max_tokens, packing=packing), names, together=True)
    for name in names:
        alone = _train(rig("float32", max_tokens, packing=packing), [name], together=False)[name]
        assert float((together[name][1] - alone[1]).abs().max()) <= 1e-5
        start = _slots(rig(), [name])[0].flat
        assert float((alone[1] - start).abs().max()) > 1e-3


@pytest.mark.parametrize("max_tokens", [4096, 40])
@pytest.mark.parametrize("packing", [True, False])
def test_in_float64_one_pass_gives_each_its_own_loss_logprobs_and_gradients(rig, packing, max_tokens):
    """1e-9, two forward_backwards accumulated, the policies in another order the second time."""
    bench, apart = rig("float64", max_tokens, packing=packing), rig("float64", packing=packing)
    slots, alone = _slots(bench), _slots(apart)
    for step in (0, 1):
        works = [_work(slot, step) for slot in slots]
        answers = bench.trainer.forward_backward_batch(works if step else works[::-1])
        for slot, answer in zip(alone, answers if step else answers[::-1], strict=True):
            work = _work(slot, step)
            wanted = apart.trainer.forward_backward(slot, work.data, work.call, go_on)
            assert answer.loss == pytest.approx(wanted.loss, rel=1e-9)
            assert answer.tokens == wanted.tokens == sum(LENGTHS[slot.policy])
            for ours, theirs in zip(answer.logprobs, wanted.logprobs, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-9)
    for ours, theirs in zip(slots, alone, strict=True):
        assert ours.accumulated == theirs.accumulated == 2
        assert relative_l2(ours.flat_gradients, theirs.flat_gradients) < 1e-9


def _bad(work, fault):
    """The policy's work with a fault in its first row, and what is said of it."""
    row, *others = work.data
    name, values = next(iter(row.inputs.items()))
    changes, reason = {
        "empty": ({}, "the batch is empty"),
        "long": ({"input_ids": (1,) * 1025}, "row row0: 1025 tokens; a row has 1 to 1024"),
        "nan": ({"inputs": {**row.inputs, name: (float("nan"), *values[1:])}}, f"row row0: {name} holds a number that"),
        "vocabulary": ({"targets": (49152, *row.targets[1:])}, "row row0: token id 49152 is outside the vocabulary"),
        "negative": ({"input_ids": (-1, *row.input_ids[1:])}, "row row0: token id -1 is outside the vocabulary"),
        "mismatched": ({"mask": row.mask[1:]}, "row row0: mask has length"),
        "coefficients": ({"coefficients": (math.inf,) * len(row.mask)}, "row row0: coefficients holds a number that"),
    }[fault]
    data = [dataclasses.replace(row, **changes), *others] if fault != "empty" else []
    return dataclasses.replace(work, data=data), reason


@pytest.mark.parametrize("fault", ["empty", "long", "nan", "vocabulary", "negative", "mismatched", "coefficients"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_bad_batch_fails_its_policy_alone(rig, fault, position):
    """The row and the reason; the others step to the bytes that they step to when it is absent, and the
    base keeps its digest."""
    bench, absent = rig(), rig()
    untouched = bench.base.digest()
    slots = _slots(bench)
    held = adapter_bytes(slots[position])
    works = [_work(slot, 0) for slot in slots]
    works[position], reason = _bad(works[position], fault)
    answers = bench.trainer.forward_backward_batch(works)
    failed = answers[position]
    assert isinstance(failed, Fatal)
    assert reason in str(failed)
    assert slots[position].gradients is None

    others = [name for name in NAMES if name != NAMES[position]]
    theirs = _slots(absent, others)
    wanted = absent.trainer.forward_backward_batch([_work(slot, 0) for slot in theirs])
    assert [a for a in answers if a is not failed] == wanted
    for slot, reference in zip([s for s in slots if s.policy in others], theirs, strict=True):
        bench.trainer.optim_step(slot, POLICIES[slot.policy][2])
        absent.trainer.optim_step(reference, POLICIES[slot.policy][2])
        assert adapter_bytes(slot) == adapter_bytes(reference)
    assert adapter_bytes(slots[position]) == held
    assert bench.base.digest() == untouched


OVERFLOWING = LossCall("importance_sampling")


def _overflowing(slot):
    """A ratio of exp(10000): every check of the rows passes, the loss does not come out."""
    data = [
        dataclasses.replace(row, inputs={**row.inputs, "logprobs": (-10000.0,) * len(row.mask)})
        for row in batch("importance_sampling", (6, 11))
    ]
    return Work(slot, data, OVERFLOWING, go_on)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("max_tokens", "bound"), [(1, 0.0), (4096, 1e-5)])
def test_a_loss_that_is_not_finite_fails_its_policy_alone(rig, packing, max_tokens, bound):
    """Its rows went through the same passes: where shapes are equal the others get the same bytes, where
    they are not they are within 1e-5; a NaN reaches no gradient but its own."""
    bench, absent = (rig("float32", max_tokens, packing=packing) for _ in range(2))
    slots, theirs = _slots(bench), _slots(absent, ("acme/a", "acme/c"))
    kept = slots[1].gradients
    answers = bench.trainer.forward_backward_batch([_work(slots[0], 0), _overflowing(slots[1]), _work(slots[2], 0)])
    assert isinstance(answers[1], Fatal)
    assert "its loss is" in str(answers[1])
    assert "row row" in str(answers[1])
    assert slots[1].gradients is kept is None
    wanted = absent.trainer.forward_backward_batch([_work(slot, 0) for slot in theirs])
    for ours, reference, answer, expected in zip(
        (slots[0], slots[2]), theirs, (answers[0], answers[2]), wanted, strict=True
    ):
        assert answer.loss == pytest.approx(expected.loss, rel=1e-5)
        for slot, bench_ in ((ours, bench), (reference, absent)):
            bench_.trainer.optim_step(slot, POLICIES[slot.policy][2])
        assert float((ours.flat - reference.flat).abs().max()) <= bound


def test_a_failed_part_leaves_what_the_slot_had_accumulated(rig):
    bench, other = rig(max_tokens=1), rig(max_tokens=1)
    (slot,), (reference,) = _slots(bench, ["acme/b"]), _slots(other, ["acme/b"])
    for trainer, its in ((bench.trainer, slot), (other.trainer, reference)):
        trainer.forward_backward_batch([_work(its, 0)])
    assert isinstance(bench.trainer.forward_backward_batch([_overflowing(slot)])[0], Fatal)
    for trainer, its in ((bench.trainer, slot), (other.trainer, reference)):
        trainer.forward_backward_batch([_work(its, 1)])
    assert slot.accumulated == reference.accumulated == 2
    assert torch.equal(slot.flat_gradients, reference.flat_gradients)


def test_a_lost_lease_ends_its_part_and_the_others_keep_their_shapes(rig):
    """The check of B raises at its third asking: A and C get the bytes of a pass with a B that goes on."""
    bench, whole = rig(max_tokens=30), rig(max_tokens=30)
    asked = []

    def lose():
        asked.append(1)
        if len(asked) >= 3:
            raise Retryable("lease lost")

    slots, reference = _slots(bench), _slots(whole)
    answers = bench.trainer.forward_backward_batch(
        [_work(slot, 0, check=lose if slot.policy == "acme/b" else go_on) for slot in slots]
    )
    wanted = whole.trainer.forward_backward_batch([_work(slot, 0) for slot in reference])
    assert isinstance(answers[1], Retryable)
    assert slots[1].gradients is None
    assert (answers[0], answers[2]) == (wanted[0], wanted[2])
    for position in (0, 2):
        assert torch.equal(slots[position].flat_gradients, reference[position].flat_gradients)
    assert len(asked) == 3


def test_when_all_have_stopped_nothing_more_is_computed(rig, monkeypatch):
    bench, passes = rig(max_tokens=1), []
    counted = bench.trainer._passes.logits
    monkeypatch.setattr(bench.trainer._passes, "logits", lambda it: passes.append(it) or counted(it))

    def lose():
        raise Retryable("lease lost")

    answers = bench.trainer.forward_backward_batch([_work(slot, 0, check=lose) for slot in _slots(bench)])
    assert all(isinstance(answer, MintError) for answer in answers)
    assert passes == []


def test_the_order_of_the_policies_in_a_turn_does_not_matter_beyond_rounding(rig):
    results = []
    for order in (NAMES, NAMES[::-1]):
        bench = rig("float64")
        slots = {slot.policy: slot for slot in _slots(bench)}
        bench.trainer.forward_backward_batch([_work(slots[name], 0) for name in order])
        results.append({name: slot.flat_gradients.clone() for name, slot in slots.items()})
    for name in NAMES:
        assert relative_l2(results[0][name], results[1][name]) < 1e-9
