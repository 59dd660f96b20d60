"""The primitives on the tiny base: slots apart, micro-batches irrelevant, bad rows refused, base untouched."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from services.learner.checkpoint import adapter_bytes
from services.learner.optimizer import AdamParams
from services.learner.slots import SlotShape
from services.learner.trainer import LossCall
from shared.errors import Fatal, Retryable
from tests.unit.learner.batches import CALLS, batch, go_on, relative_l2, shake

CALL = LossCall("cross_entropy")
ADAM = AdamParams(learning_rate=1e-2, eps=1e-8)


def _go_on() -> None:
    return None


def test_a_step_lowers_the_loss_and_a_fresh_adapter_is_the_base(rig, rows):
    bench = rig()
    slot, data = bench.fresh("acme/a"), rows()
    first = bench.trainer.forward_backward(slot, data, CALL, _go_on)
    with torch.no_grad():
        for parameter in slot.parameters.values():
            assert parameter.dtype is torch.float32
    bench.trainer.optim_step(slot, ADAM)
    second = bench.trainer.forward_backward(slot, data, CALL, _go_on)
    assert second.loss < first.loss - 0.01
    assert [len(row) for row in first.logprobs] == [len(d.input_ids) for d in data]
    assert first.logprobs[0][:2] == [0.0, 0.0]


def test_optim_step_of_one_policy_leaves_the_other_alone(rig, rows):
    """open-rl#80: fb(A), fb(B), step(A) → B's adapter, moments and gradients keep their bytes."""
    bench = rig()
    a = bench.fresh("acme/a", seed=1)
    b = bench.fresh("acme/b", seed=2, shape=SlotShape(2, 16.0, True, ("k_proj", "gate_proj")))
    bench.trainer.forward_backward(a, rows(seed=1), CALL, _go_on)
    bench.trainer.forward_backward(b, rows(seed=2), CALL, _go_on)
    assert a.gradients is not None
    assert b.gradients is not None
    held = adapter_bytes(b), {n: g.clone() for n, g in b.gradients.items()}, adapter_bytes(a)
    bench.trainer.optim_step(a, ADAM)
    assert adapter_bytes(b) == held[0]
    assert adapter_bytes(a) != held[2]
    assert all(torch.equal(b.gradients[n], g) for n, g in held[1].items())
    assert b.optimizer.step_count == 0
    assert not any(moment.any() for moment in b.optimizer.first.values())
    assert a.gradients is None


def test_interleaved_policies_get_the_bytes_that_they_get_alone(rig, rows):
    shape_b = SlotShape(2, 16.0, True, ("k_proj", "gate_proj"))

    def train(bench, names):
        slots = {
            name: bench.fresh(name, seed, shape)
            for name, seed, shape in (("acme/a", 1, SlotShape(4, 8.0, False, ("q_proj",))), ("acme/b", 2, shape_b))
            if name in names
        }
        for step in range(3):
            for slot in slots.values():
                bench.trainer.forward_backward(slot, rows(seed=step), CALL, _go_on)
            for slot in slots.values():
                bench.trainer.optim_step(slot, ADAM)
        return {name: adapter_bytes(slot) for name, slot in slots.items()}

    together = train(rig(), {"acme/a", "acme/b"})
    assert together["acme/a"] == train(rig(), {"acme/a"})["acme/a"]
    assert together["acme/b"] == train(rig(), {"acme/b"})["acme/b"]


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-5), ("float64", 1e-9)])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("loss", CALLS)
def test_loss_and_gradients_do_not_depend_on_micro_batches(rig, loss, packing, precision, bound):
    """1 × 4 or 4 × 1 (two pairs are 2 × 2), and something between: 1e-9 in float64, 1e-5 relative L2 in
    fp32. Gradients are summed, each row's coefficients being fixed from the whole step."""
    found, data = [], batch(loss, (12, 7, 15, 4))
    for max_tokens in (4096, 1, 30):
        bench = rig(precision, max_tokens=max_tokens, packing=packing)
        slot = shake(bench.fresh("acme/a"))
        result = bench.trainer.forward_backward(slot, data, CALLS[loss], _go_on)
        found.append((result, slot.flat_gradients.clone()))
    (whole, wanted), *others = found
    assert float(wanted.norm()) > 1e-3
    for result, gradients in others:
        assert result.loss == pytest.approx(whole.loss, rel=bound)
        assert result.tokens == whole.tokens == 38
        assert relative_l2(gradients, wanted) < bound
        for ours, theirs in zip(result.logprobs, whole.logprobs, strict=True):
            assert ours == pytest.approx(theirs, rel=bound)


@pytest.mark.parametrize("loss", CALLS)
def test_a_step_is_the_sum_of_what_its_rows_weigh(rig, loss):
    """Row by row (pair by pair) in calls of their own, gradients accumulated: the whole step's to 1e-9."""
    bench, data = rig("float64"), batch(loss, (12, 7, 15, 4))
    whole, parts = shake(bench.fresh("acme/a")), shake(bench.fresh("acme/b"))
    total = bench.trainer.forward_backward(whole, data, CALLS[loss], _go_on).loss
    size = 2 if loss == "dpo" else 1
    losses = [
        bench.trainer.forward_backward(parts, data[at : at + size], CALLS[loss], _go_on).loss
        for at in range(0, 4, size)
    ]
    assert sum(losses) == pytest.approx(total, rel=1e-9)
    assert parts.accumulated == 4 // size
    assert relative_l2(parts.flat_gradients, whole.flat_gradients) < 1e-9


def test_two_calls_accumulate_to_the_gradient_of_one(rig, rows):
    bench = rig("float64")
    data = rows()
    whole, halves = bench.fresh("acme/a"), bench.fresh("acme/b")
    bench.trainer.forward_backward(whole, data, CALL, _go_on)
    bench.trainer.forward_backward(halves, data[:2], CALL, _go_on)
    bench.trainer.forward_backward(halves, data[2:], CALL, _go_on)
    assert relative_l2(halves.flat_gradients, whole.flat_gradients) < 1e-9


def test_sft_loss_equals_the_loss_of_transformers(rig, rows):
    bench = rig()
    data = [rows(count=1, shortest=9)[0]]
    ids = [*data[0].input_ids, data[0].targets[-1]]
    labels = [-100, *(t if m else -100 for t, m in zip(data[0].targets, data[0].mask, strict=True))]
    slot = bench.fresh("acme/a")
    ours = bench.trainer.forward_backward(slot, data, CALL, _go_on)
    with bench.base.router.applied([slot.span()]):
        theirs = bench.base.module(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
    assert ours.loss == pytest.approx(float(theirs.detach()), rel=1e-5)


def test_logits_are_divided_by_the_temperature(rig, rows):
    bench = rig()
    slot, data = bench.fresh("acme/a"), rows(count=2)
    at = bench.trainer.forward(slot, data, 0.6, _go_on)
    for datum, row in zip(data, at, strict=True):
        with bench.base.router.applied([slot.span()]):
            logits = bench.base.module(input_ids=torch.tensor([datum.input_ids])).logits[0].double()
        wanted = torch.log_softmax(logits / 0.6, dim=-1).gather(1, torch.tensor(datum.targets)[:, None])[:, 0]
        for got, want, taken in zip(row, wanted.tolist(), datum.mask, strict=True):
            assert got == pytest.approx(want if taken else 0.0, abs=1e-4)


def test_the_slot_used_longest_ago_is_evicted_and_open_gradients_are_kept(rig, rows):
    bench = rig(capacity=2)
    a = bench.fresh("acme/a")
    bench.fresh("acme/b")
    bench.trainer.forward_backward(a, rows(), CALL, _go_on)
    bench.fresh("acme/c")
    assert bench.slots.policies == ("acme/a", "acme/c")
    bench.trainer.forward_backward(bench.slots.acquire("acme/c", a.shape), rows(), CALL, _go_on)
    with pytest.raises(Retryable, match="2 slots hold gradients"):
        bench.fresh("acme/d")
    assert bench.slots.acquire("acme/a", a.shape) is a
    assert bench.slots.acquire("acme/a", SlotShape(2, 8.0, False, ("q_proj",))) is not a


def test_an_evicted_adapter_leaves_nothing_behind(rig, rows):
    bench = rig(capacity=1)
    alone = bench.trainer.forward(bench.fresh("acme/b", seed=5), rows(), 1.0, _go_on)
    a = bench.fresh("acme/a")
    bench.trainer.forward_backward(a, rows(), CALL, _go_on)
    bench.trainer.optim_step(a, AdamParams(learning_rate=0.5, eps=1e-8))
    after = bench.trainer.forward(bench.fresh("acme/b", seed=5), rows(), 1.0, _go_on)
    assert after == alone


def test_the_base_keeps_its_bytes_through_training_and_a_thousand_publishes(rig, rows):
    """NeMo-RL#3696, trl#6688: nothing is merged into the base, so 1000 publish cycles leave its hash."""
    bench = rig(capacity=2)
    untouched = bench.base.digest()
    slot = bench.fresh("acme/a")
    for cycle in range(1000):
        if cycle % 100 == 0:
            bench.trainer.forward_backward(slot, rows(seed=cycle), CALL, _go_on)
            bench.trainer.optim_step(slot, ADAM)
            bench.fresh(f"acme/other{cycle}")
            slot = bench.slots.acquire("acme/a", slot.shape)
        adapter_bytes(slot)
    assert bench.base.digest() == untouched
    assert not any(p.requires_grad for p in bench.base.module.parameters())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"targets": (1, 2)}, "targets has length 2, the row 5"),
        ({"mask": (True,)}, "mask has length 1"),
        ({"input_ids": (1, 2, 3, 4, 49152)}, "token id 49152 is outside the vocabulary of 49152"),
        ({"input_ids": (1,) * 2000}, "2000 tokens; a row has 1 to 1024"),
        ({"input_ids": ()}, "0 tokens"),
        ({"mask": (False,) * 5}, "no position"),
        ({"inputs": {}}, r"its inputs are \[\], the first row's \['weights'\]"),
        ({"inputs": {"weights": (1.0, float("nan"), 1.0, 1.0, 1.0)}}, "weights holds a number that is not finite"),
    ],
)
def test_a_bad_row_fails_its_policy_by_name_and_the_others_step_on(rig, rows, change, reason):
    bench = rig()
    a, b = bench.fresh("acme/a"), bench.fresh("acme/b")
    good = rows()
    bad = dataclasses.replace(good[0], **change)
    with pytest.raises(Fatal, match=f"row row0: .*{reason}"):
        bench.trainer.forward_backward(a, [good[1], bad], CALL, _go_on)
    assert a.gradients is None
    bench.trainer.forward_backward(b, good, CALL, _go_on)
    assert bench.trainer.optim_step(b, ADAM) > 0


def test_an_empty_batch_an_unknown_loss_and_a_step_without_gradients_are_refused(rig, rows):
    bench = rig()
    slot = bench.fresh("acme/a")
    with pytest.raises(Fatal, match="batch is empty"):
        bench.trainer.forward_backward(slot, [], CALL, _go_on)
    with pytest.raises(Fatal, match="row row0: the loss needs advantages, logprobs"):
        bench.trainer.forward_backward(slot, rows(), LossCall("ppo"), _go_on)
    with pytest.raises(Fatal, match="unknown loss 'stable_reinforce'; known are"):
        bench.trainer.forward_backward(slot, rows(), LossCall("stable_reinforce"), _go_on)
    with pytest.raises(Fatal, match="no setting beta"):
        bench.trainer.forward_backward(slot, rows(), LossCall("ppo", {"beta": 1.0}), _go_on)
    with pytest.raises(Fatal, match="needs a forward_backward"):
        bench.trainer.optim_step(slot, ADAM)
    with pytest.raises(Fatal, match="does not take this adapter"):
        bench.fresh("acme/x", shape=SlotShape(2, 8.0, False, ("nonsense",)))


def test_a_loss_that_is_not_finite_is_fatal_and_changes_nothing(rig, rows):
    bench = rig(max_tokens=1)
    slot = bench.fresh("acme/a")
    with torch.no_grad():
        next(iter(slot.parameters.values())).fill_(float("nan"))
        slot.parameters[next(n for n in slot.parameters if "lora_B" in n)].fill_(1.0)
    before = adapter_bytes(slot)
    with pytest.raises(Fatal, match="row row3: its loss is nan; no step was made"):
        bench.trainer.forward_backward(slot, rows(), CALL, _go_on)
    assert slot.gradients is None
    assert adapter_bytes(slot) == before


def test_a_check_that_raises_ends_the_call_between_micro_batches(rig, rows):
    bench = rig(max_tokens=1)
    slot, calls = bench.fresh("acme/a"), []

    def lose() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Retryable("lease lost")

    with pytest.raises(Retryable, match="lease lost"):
        bench.trainer.forward_backward(slot, rows(), CALL, lose)
    assert len(calls) == 3
    assert slot.gradients is None


def test_a_loss_of_pairs_refuses_a_row_without_one(rig):
    """It would be a loss of 0 and a gradient of 0, in silence."""
    bench = rig()
    data = batch("dpo", (5, 9))
    alone = [dataclasses.replace(row, pair="") for row in data]
    with pytest.raises(Fatal, match=f"row {data[0].name}: the loss dpo is of pairs, and this row has none"):
        bench.trainer.forward_backward(bench.fresh("acme/a"), alone, CALLS["dpo"], go_on)
