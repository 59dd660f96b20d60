"""Adapters on the resident base are what PEFT computes, and none outlives the pass that it was named for."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from services.learner.lora import Span
from services.learner.slots import SlotShape
from shared.bases import DENSE_TARGETS
from shared.errors import Fatal, Retryable
from tests.unit.learner.batches import CALLS, batch, go_on, relative_l2, shake

SHAPES = [
    pytest.param(SlotShape(4, 8.0, False, ("q_proj", "v_proj", "down_proj")), id="r4"),
    pytest.param(SlotShape(9, 12.0, True, ("k_proj", "o_proj")), id="rslora"),
    pytest.param(SlotShape(1, 1.0, False, tuple(sorted(DENSE_TARGETS))), id="all-linear"),
    pytest.param(SlotShape(16, 4.0, True, ("gate_proj", "up_proj")), id="mlp"),
]


@pytest.mark.parametrize(
    ("rank", "alpha", "use_rslora", "scaling"), [(4, 8.0, False, 2.0), (4, 8.0, True, 4.0), (16, 4.0, False, 0.25)]
)
def test_the_scaling_is_alpha_over_r_or_over_its_root(rank, alpha, use_rslora, scaling):
    assert SlotShape(rank, alpha, use_rslora, ("q_proj",)).scaling == scaling


def _peft(directory, shape, slot):
    """The same tensors in a PEFT model."""
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    config = LoraConfig(
        r=shape.rank, lora_alpha=shape.alpha, use_rslora=shape.use_rslora, target_modules=list(shape.target_modules)
    )
    model = get_peft_model(plain, config, autocast_adapter_dtype=False).eval()
    theirs = {
        name.removeprefix("base_model.model.").replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert theirs.keys() == slot.parameters.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(slot.parameters[name])
    return model, theirs


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_and_gradients_equal_those_of_peft(rig, tiny_directory, shape, packing):
    """1e-9 in float64, over ragged rows, for other ranks, scalings and target sets."""
    bench = rig("float64", packing=packing)
    slot = shake(bench.fresh("acme/a", shape=shape))
    data = batch("cross_entropy", (9, 4, 13))
    ours = bench.trainer.forward_backward(slot, data, CALLS["cross_entropy"], go_on)

    model, theirs = _peft(tiny_directory, shape, slot)
    loss = torch.zeros((), dtype=torch.float64)
    for datum, row in zip(data, ours.logprobs, strict=True):
        logits = model(input_ids=torch.tensor([datum.input_ids])).logits[0]
        lp = torch.log_softmax(logits, -1).gather(1, torch.tensor(datum.targets)[:, None])[:, 0]
        mask, weights = torch.tensor(datum.mask), torch.tensor(datum.inputs["weights"], dtype=torch.float64)
        loss = loss - (lp * mask * weights * torch.tensor(datum.coefficients, dtype=torch.float64)).sum()
        assert torch.allclose(torch.tensor(row, dtype=torch.float64), (lp * mask).detach(), rtol=1e-9, atol=1e-9)
    loss.backward()
    assert ours.loss == pytest.approx(float(loss.detach()), rel=1e-9)
    assert slot.gradients is not None
    for name, gradient in slot.gradients.items():
        assert relative_l2(gradient, theirs[name].grad) < 1e-9, name


def test_without_an_adapter_the_base_speaks(rig, tiny_directory):
    """Bytes: adapter off is the base, before, between and after passes with adapters."""
    data = batch("cross_entropy", (9, 4, 13))
    untouched = rig().trainer.forward(None, data, 1.0, go_on)
    bench = rig()
    slot = shake(bench.fresh("acme/a"))
    assert bench.trainer.forward(slot, data, 1.0, go_on) != untouched
    assert bench.trainer.forward(None, data, 1.0, go_on) == untouched
    bench.trainer.forward_backward(slot, data, CALLS["cross_entropy"], go_on)
    assert bench.trainer.forward(None, data, 1.0, go_on) == untouched
    fresh = bench.fresh("acme/b")
    assert bench.trainer.forward(fresh, data, 1.0, go_on) == untouched


def test_a_span_reaches_its_tokens_and_no_others(rig):
    """Two adapters and a stretch without one in a single pass, against each alone; 1e-9 in float64."""
    bench = rig("float64", packing=False)
    a = shake(bench.fresh("acme/a", shape=SlotShape(4, 8.0, False, ("q_proj", "down_proj"))), seed=1)
    b = shake(bench.fresh("acme/b", shape=SlotShape(2, 8.0, True, ("v_proj", "down_proj"))), seed=2)
    ids = torch.randint(3, 49152, (5, 7), generator=torch.Generator().manual_seed(0))
    module, router = bench.base.module, bench.base.router

    @torch.no_grad()
    def under(*spans: Span) -> torch.Tensor:
        with router.applied(spans):
            return module(input_ids=ids).logits

    mixed = under(a.span(0, 7), b.span(14, 28))
    for rows, wanted in ((slice(0, 1), a.span()), (slice(2, 4), b.span())):
        assert torch.allclose(mixed[rows], under(wanted)[rows], rtol=1e-9, atol=1e-12)
    for rows in (slice(1, 2), slice(4, 5)):
        assert torch.allclose(mixed[rows], under()[rows], rtol=1e-9, atol=1e-12)
    assert (under(a.span()) - under(b.span())).abs().amax(dim=-1).min() > 1e-3


def test_more_tokens_than_the_batch_has_are_refused(rig):
    bench = rig()
    slot = bench.fresh("acme/a")
    with bench.base.router.applied([slot.span(0, 9)]), pytest.raises(ValueError, match="saw 3 tokens of a batch of 9"):
        bench.base.module(input_ids=torch.tensor([[5, 6, 7]]))


@pytest.mark.parametrize("packing", [True, False])
def test_nothing_of_an_adapter_outlives_a_pass_that_failed(rig, packing, monkeypatch):
    """One failed batch, then another policy's request: it gives what it gives alone."""
    data = batch("cross_entropy", (9, 4, 13))
    reference = rig(packing=packing)
    alone = reference.trainer.forward(shake(reference.fresh("acme/b", seed=2)), data, 1.0, go_on)
    plain = reference.trainer.forward(None, data, 1.0, go_on)

    bench = rig(packing=packing)
    a, b = shake(bench.fresh("acme/a")), shake(bench.fresh("acme/b", seed=2))
    layer = bench.base.module.model.layers[1].mlp
    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", _out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            bench.trainer.forward_backward(a, data, CALLS["cross_entropy"], go_on)
    assert a.gradients is None
    # asked past the trainer, so that nothing but what the failed pass left could speak
    ids = torch.tensor([data[0].input_ids])
    with torch.no_grad():
        assert torch.equal(bench.base.module(input_ids=ids).logits, reference.base.module(input_ids=ids).logits)
    assert bench.trainer.forward(b, data, 1.0, go_on) == alone
    assert bench.trainer.forward(None, data, 1.0, go_on) == plain


def _out_of_memory(*args: object) -> None:
    raise RuntimeError("out of memory")


def test_what_a_learner_does_not_take_is_refused_by_name(rig):
    bench = rig(capacity=1)
    with pytest.raises(Fatal, match="acme/a: rank 17 is more than this learner's 16"):
        bench.slots.acquire("acme/a", SlotShape(17, 8.0, False, ("q_proj",)))
    with pytest.raises(Fatal, match="does not take this adapter"):
        bench.slots.acquire("acme/a", SlotShape(4, 8.0, False, ("q_proj", "lm_head")))
    assert bench.slots.policies == ()
    kept = bench.fresh("acme/b")
    with bench.slots.using([kept]), pytest.raises(Retryable):
        bench.fresh("acme/c")
    assert bench.slots.policies == ("acme/b",)
