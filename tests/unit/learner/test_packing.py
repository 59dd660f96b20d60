"""Packed, padded and one row at a time are one function, in every architecture whose attention is ours."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.learner import packing
from services.learner.base_model import ResidentBase
from services.learner.optimizer import AdamParams
from services.learner.packing import packed
from services.learner.slots import SlotShape
from tests.unit.learner.architectures import ATTENTION, LATENT_ATTENTION, VOCABULARY
from tests.unit.learner.batches import CALLS, batch, go_on, relative_l2, shake

TARGETS = {
    "llama": ATTENTION,
    "mistral": ATTENTION,
    "qwen2": ATTENTION,
    "qwen3_moe": ATTENTION,
    "deepseek_v3": LATENT_ATTENTION,
}
# its router computes in fp32, whatever the precision of the rest
ROUTER_BOUND = {"deepseek_v3": 1e-5}
BOUNDS = [("float64", 1e-9), ("float32", 1e-5)]
RAGGED = (13, 5, 9, 2)
MIXED = (7, 12, 7, 1, 7, 12)


def _bench(rig, architecture, name, precision="float64", max_tokens=4096, packing=True):
    bench = rig(precision, max_tokens, packing=packing, directory=architecture(name), targets=TARGETS[name])
    assert bench.base.packing is packing
    return bench


def _result(rig, architecture, name, precision, packing, max_tokens, lengths, loss="grpo"):
    """Loss, logprobs and flat gradients of a trained adapter."""
    bench = _bench(rig, architecture, name, precision, max_tokens, packing)
    slot = shake(bench.fresh("acme/a", shape=SlotShape(4, 8.0, False, TARGETS[name])))
    answer = bench.trainer.forward_backward(slot, batch(loss, lengths, vocabulary=VOCABULARY), CALLS[loss], go_on)
    return (
        answer.loss,
        torch.tensor(list(chain.from_iterable(answer.logprobs)), dtype=torch.float64),
        slot.flat_gradients.clone(),
    )


@pytest.mark.parametrize(("precision", "bound"), BOUNDS)
@pytest.mark.parametrize("lengths", [RAGGED, MIXED, (6, 6, 6, 6)])
@pytest.mark.parametrize("name", TARGETS)
def test_packed_equals_padded_equals_one_row_at_a_time(rig, architecture, name, lengths, precision, bound):
    """1e-9 in float64, 1e-5 relative L2 in fp32; rows of equal and of different lengths, grouped queries,
    windows shorter than the rows, experts, and latent attention."""
    bound = max(bound, ROUTER_BOUND.get(name, 0.0))
    wanted = _result(rig, architecture, name, precision, False, 1, lengths)
    assert float(wanted[2].norm()) > 1e-3
    for without_padding, max_tokens in ((True, 4096), (True, 1), (False, 4096)):
        loss, logprobs, gradients = _result(rig, architecture, name, precision, without_padding, max_tokens, lengths)
        assert loss == pytest.approx(wanted[0], rel=bound)
        assert relative_l2(logprobs, wanted[1]) < bound
        assert relative_l2(gradients, wanted[2]) < bound


@pytest.mark.parametrize("name", TARGETS)
def test_packed_rows_are_what_the_plain_model_says_of_each(rig, architecture, name):
    """Transformers' own masks and windows, one row at a time; 1e-9 in float64."""
    bench = _bench(rig, architecture, name)
    plain = AutoModelForCausalLM.from_pretrained(architecture(name), dtype=torch.float64, attn_implementation="sdpa")
    plain.set_experts_implementation("eager")
    bound = ROUTER_BOUND.get(name, 1e-9)
    data = batch("cross_entropy", MIXED, vocabulary=VOCABULARY)
    found = bench.trainer.forward(None, data, 0.6, go_on)
    for datum, row in zip(data, found, strict=True):
        with torch.no_grad():
            logits = plain.eval()(input_ids=torch.tensor([datum.input_ids])).logits[0]
        wanted = torch.log_softmax(logits / 0.6, -1).gather(1, torch.tensor(datum.targets)[:, None])[:, 0]
        wanted = wanted * torch.tensor(datum.mask)
        assert torch.allclose(torch.tensor(row, dtype=torch.float64), wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_a_window_is_no_full_attention(rig, architecture, name):
    """So that equality of windowed rows says something: without the window the logprobs are others."""
    bench = _bench(rig, architecture, name)
    data = batch("cross_entropy", (13,), vocabulary=VOCABULARY)
    (windowed,) = bench.trainer.forward(None, data, 1.0, go_on)
    bench.base.module.config.sliding_window = 100
    for layer in bench.base.module.model.layers:
        layer.self_attn.sliding_window = 100
    (full,) = bench.trainer.forward(None, data, 1.0, go_on)
    assert max(abs(a - b) for a, b in zip(windowed, full, strict=True)) > 1e-3


@pytest.mark.parametrize("packing", [True, False])
def test_a_rows_result_does_not_depend_on_its_companions(rig, architecture, packing):
    bench = rig("float64", packing=packing, directory=architecture("mistral"), targets=ATTENTION)
    slot = shake(bench.fresh("acme/a", shape=SlotShape(4, 8.0, False, ATTENTION)))
    row, *others = batch("cross_entropy", (11, 11, 3, 20), vocabulary=VOCABULARY)
    (alone,) = bench.trainer.forward(slot, [row], 1.0, go_on)
    for company in ([row, *others], [*others, row], [others[2], row], [row, row]):
        found = bench.trainer.forward(slot, company, 1.0, go_on)
        for datum, values in zip(company, found, strict=True):
            if datum is row:
                assert values == pytest.approx(alone, rel=1e-9)


def test_a_target_that_is_changed_in_one_row_moves_no_other(rig, architecture):
    """Bytes: another row's ids may be anything at all, so long as it is as long."""
    bench = rig(directory=architecture("llama"), targets=ATTENTION)
    first = batch("cross_entropy", (11, 5, 8), seed=1, vocabulary=VOCABULARY)
    second = [first[0], batch("cross_entropy", (5,), seed=2, vocabulary=VOCABULARY)[0], first[2]]
    one, other = (bench.trainer.forward(None, data, 1.0, go_on) for data in (first, second))
    assert (one[0], one[2]) == (other[0], other[2])
    assert one[1] != other[1]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_experts_and_latent_attention_learn_through_attention_targets(rig, architecture, name, packing):
    bench = rig(packing=packing, directory=architecture(name), targets=TARGETS[name])
    untouched = bench.base.digest()
    slot = bench.fresh("acme/a", shape=SlotShape(4, 8.0, False, TARGETS[name]))
    data = batch("cross_entropy", RAGGED, vocabulary=VOCABULARY)
    losses = []
    for _ in range(3):
        losses.append(bench.trainer.forward_backward(slot, data, CALLS["cross_entropy"], go_on).loss)
        bench.trainer.optim_step(slot, AdamParams(learning_rate=1e-2, eps=1e-8))
    assert losses[0] > losses[1] > losses[2]
    assert bench.base.digest() == untouched


def test_attention_that_cannot_be_exchanged_is_padded(rig, architecture):
    """Bloom builds its own attention with ALiBi; asked to pack it pads, and one row at a time is the same."""
    targets = ("query_key_value",)
    results = []
    for max_tokens in (4096, 1):
        bench = rig("float64", max_tokens, packing=True, directory=architecture("bloom"), targets=targets)
        assert not bench.base.packing
        slot = shake(bench.fresh("acme/a", shape=SlotShape(4, 8.0, False, targets)))
        data = batch("cross_entropy", MIXED, vocabulary=VOCABULARY)
        bench.trainer.forward_backward(slot, data, CALLS["cross_entropy"], go_on)
        results.append(slot.flat_gradients.clone())
    assert relative_l2(results[0], results[1]) < 1e-9


def test_attention_with_parts_that_packing_does_not_know_is_padded(architecture):
    """Gemma 2 caps its attention logits; rows that are packed would silently go without."""
    resident = ResidentBase(architecture("gemma2"), "float64", ATTENTION)
    assert not resident.packing
    plain = AutoModelForCausalLM.from_pretrained(architecture("gemma2"), dtype=torch.float64).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    with torch.no_grad():
        assert torch.equal(resident.module(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize("change", [{"attention_chunk_size": 8}, {"layer_types": ["linear_attention"] * 2}])
def test_layers_that_see_rows_in_another_way_are_padded(architecture, change):
    """Chunks are longer than the rows that packing is tried with, so it is the config that says so."""
    module = AutoModelForCausalLM.from_pretrained(architecture("llama")).eval()
    assert packing.pack_attention(module)
    for name, value in change.items():
        object.__setattr__(module.config, name, value)
    assert not packing.pack_attention(module)


def test_packing_that_mixes_rows_is_found_at_load(architecture, monkeypatch):
    monkeypatch.setattr(packing, "packed", lambda lengths: packed([sum(lengths)]))
    assert not ResidentBase(architecture("mistral"), "float32", ATTENTION).packing


def test_outside_of_packing_the_attention_is_the_plain_one(architecture):
    """The engines of a process and a learner's packing do not know of each other."""
    resident = ResidentBase(architecture("mistral"), "float64", ATTENTION)
    plain = AutoModelForCausalLM.from_pretrained(architecture("mistral"), dtype=torch.float64)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [2, 2, 2, 5, 6, 7, 8]])
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    with torch.no_grad(), pytest.raises(RuntimeError), packed([7, 8]):
        resident.module(input_ids=ids[:1])
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids, attention_mask=mask).logits for m in (resident.module, plain.eval()))
    assert torch.allclose(ours[mask == 1], theirs[mask == 1], rtol=1e-9, atol=1e-12)
