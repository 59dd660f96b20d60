"""Every loss against a float64 reference written from the formula, on random ragged masked batches."""

from __future__ import annotations

import math
import random
from itertools import compress

import pytest
import torch

from services.learner.losses import LOSSES, loss_named, trajectory_coefficients
from services.learner.optimizer import AdamParams, AdamW, clip_gradients
from shared.errors import Fatal


def _clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def _reference(name, lp, i):
    """(ℓ, dℓ/dlp) of one token, by hand."""
    if name == "cross_entropy":
        return -i["weights"] * lp, -i["weights"]
    a = i["advantages"]
    if name == "importance_sampling":
        r = math.exp(lp - i["logprobs"])
        return -r * a, -r * a
    low, high = 0.8, 1.2
    r = math.exp(lp - i["logprobs" if name == "ppo" else "old_logprobs"])
    if name == "grpo":
        low, high = 1 - 0.2, 1 + 0.28
    unclipped, clipped = r * a, _clip(r, low, high) * a
    inside = unclipped <= clipped
    return -min(unclipped, clipped), -r * a if inside else 0.0


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_the_float64_reference(name, seed):
    rng = random.Random(seed)
    mask = [rng.random() < 0.7 for _ in range(rng.randint(20, 90))]
    lp = torch.tensor([-rng.expovariate(1) for _ in compress(mask, mask)], dtype=torch.float64, requires_grad=True)
    rows = [
        {
            "weights": rng.uniform(-1, 2),
            "advantages": rng.gauss(0, 1),
            "logprobs": value + rng.gauss(0, 0.5),
            "old_logprobs": value + rng.gauss(0, 0.5),
        }
        for value in lp.tolist()
    ]
    inputs = {key: torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in rows[0]}
    config = {"clip_high": 0.28} if name == "grpo" else {}
    losses = LOSSES[name](lp, inputs, config)
    (gradient,) = torch.autograd.grad(losses.sum(), lp)
    wanted = [_reference(name, value, row) for value, row in zip(lp.tolist(), rows, strict=True)]
    assert losses.tolist() == pytest.approx([loss for loss, _ in wanted], rel=1e-9, abs=1e-12)
    assert gradient.tolist() == pytest.approx([g for _, g in wanted], rel=1e-9, abs=1e-12)


def test_grpo_without_old_logprobs_has_ratio_one_and_the_policy_gradient():
    lp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    losses = LOSSES["grpo"](lp, {"advantages": torch.tensor([1.5, -0.5], dtype=torch.float64)}, {})
    (gradient,) = torch.autograd.grad(losses.sum(), lp)
    assert losses.tolist() == [-1.5, 0.5]
    assert gradient.tolist() == [-1.5, 0.5]


def test_masked_tokens_are_out_of_the_denominator():
    """trl#6439: 4 kept and 6 masked tokens with loss 1 each → 1.0, not 0.4."""
    for aggregation in ("grpo", "token"):
        (weight,) = trajectory_coefficients([4], aggregation, max_tokens=10)
        assert 4 * weight * 1.0 == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize(("aggregation", "wanted"), [("grpo", 0.0), ("token", 0.6), ("dr_grpo", 0.1875)])
def test_length_bias_of_each_aggregation(aggregation, wanted):
    """trl#2995, trl#3138: lengths 2 (+1) and 8 (−1) at ratio 1."""
    lengths, advantages = [2, 8], [1.0, -1.0]
    weights = trajectory_coefficients(lengths, aggregation, max_tokens=16)
    loss = sum(-w * n * a for w, n, a in zip(weights, lengths, advantages, strict=True))
    assert loss == pytest.approx(wanted, abs=1e-12)


def test_unknown_names_say_what_is_known():
    with pytest.raises(ValueError, match="known are grpo, token, dr_grpo"):
        trajectory_coefficients([1], "mean", 4)
    with pytest.raises(Fatal, match="unknown loss 'dpo'; known are cross_entropy"):
        loss_named("dpo", {})


def test_adamw_equals_pytorchs_optimizer():
    torch.manual_seed(0)
    mine = {"a": torch.randn(4, 3), "b": torch.randn(5)}
    theirs = [tensor.clone().requires_grad_() for tensor in mine.values()]
    params = AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    optimizer = AdamW(mine)
    for _ in range(5):
        gradients = {name: torch.randn_like(tensor) for name, tensor in mine.items()}
        for tensor, gradient in zip(theirs, gradients.values(), strict=True):
            tensor.grad = gradient.clone()
        optimizer.step(gradients, params)
        reference.step()
    assert optimizer.step_count == 5
    for tensor, other in zip(mine.values(), theirs, strict=True):
        assert torch.equal(tensor, other.detach())


def test_clipping_scales_to_the_norm_and_leaves_smaller_ones():
    gradients = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    assert clip_gradients(gradients, 10.0) == pytest.approx(5.0)
    assert gradients["a"].item() == 3.0
    assert clip_gradients(gradients, 1.0) == pytest.approx(5.0)
    assert gradients["b"].item() == pytest.approx(0.8)
    assert clip_gradients(gradients, 0.0) == pytest.approx(1.0)
