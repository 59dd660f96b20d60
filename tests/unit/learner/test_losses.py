"""Every loss and every option of it against 50-digit references written from the formulas, on random
ragged masked batches; what the losses refuse, and what they do where a ratio overflows."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from services.learner.losses import LOSSES, Rows, loss_named, trajectory_coefficients
from services.learner.optimizer import AdamParams, AdamW, clip_gradients
from shared.errors import Fatal
from tests.unit.learner.formulas import flatten, random_rows, reference

SAMPLED = ("advantages", "logprobs")
THRESHOLDS = (*SAMPLED, "clip_low_threshold", "clip_high_threshold")
TINKER = [
    ("cross_entropy", {}, ("weights",)),
    ("importance_sampling", {}, SAMPLED),
    ("ppo", {}, SAMPLED),
    ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}, SAMPLED),
    ("ppo", {}, THRESHOLDS),
    ("cispo", {}, SAMPLED),
    ("cispo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}, SAMPLED),
    ("cispo", {}, THRESHOLDS),
    ("dro", {"beta": 0.3}, SAMPLED),
    ("gspo", {}, SAMPLED),
    ("gspo", {"clip_low_threshold": 0.97, "clip_high_threshold": 1.02}, (*SAMPLED, "sequence_ratio_mask")),
    ("gspo", {}, (*THRESHOLDS, "sequence_ratio_mask")),
    ("dpo", {}, ("ref_logprobs",)),
    ("dpo", {"beta": 2.5}, ("ref_logprobs",)),
]
KL = [
    {},
    {"kl": "k1", "kl_coefficient": 0.3},
    {"kl": "k2", "kl_coefficient": 0.3},
    {"kl": "k3", "kl_coefficient": 0.3},
    {"kl": "k3", "kl_coefficient": 0.3, "kl_times_ratio": 1.0},
]
CORRECTIONS = [
    {},
    {"correction": "tis", "correction_cap": 1.2},
    {"correction": "icepop", "correction_low": 0.8, "correction_high": 1.3},
    {"correction": "tis"},
    {"correction": "icepop"},
]
GRPO = [
    ({"objective": objective, "clip_low": 0.15, "clip_high": 0.28} | correction | kl, with_old)
    for objective, correction, kl, with_old in product(("grpo", "cispo", "gspo"), CORRECTIONS[:3], KL, (True, False))
]


def _compare(name, config, names, seed):
    rows = random_rows(seed, names=names, spread=1.0 if "correction" in config else 0.4)
    lp, inputs, c, structure = flatten(rows, names)
    loss = (c * loss_named(name, config)(lp, inputs, config, structure)).sum()
    (gradient,) = torch.autograd.grad(loss, lp)
    wanted, wanted_gradient = reference(name, config, rows)
    assert loss.item() == pytest.approx(wanted, rel=1e-9)
    assert gradient.tolist() == pytest.approx(wanted_gradient, rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "config", "names"), TINKER)
def test_loss_and_gradient_equal_the_reference(name, config, names, seed):
    _compare(name, config, names, seed)


@pytest.mark.parametrize(("config", "with_old"), GRPO)
def test_every_combination_of_grpos_options_equals_the_reference(config, with_old):
    names = (*SAMPLED, "ref_logprobs") + (("old_logprobs",) if with_old else ())
    _compare("grpo", config, names, seed=GRPO.index((config, with_old)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("correction", CORRECTIONS[3:])
def test_the_corrections_defaults_are_2_and_0_5_to_5(correction, seed):
    _compare("grpo", correction, (*SAMPLED, "old_logprobs"), seed)


def test_the_corrections_on_numbers():
    """TIS min(w, 2); IcePop w if 0.5 ≤ w ≤ 5, else 0; both multiply a loss of −1."""
    weights = torch.tensor([0.25, 0.5, 1.0, 2.5, 5.0, 8.0], dtype=torch.float64)
    old = torch.zeros(6, dtype=torch.float64)
    inputs = {"advantages": torch.ones_like(old), "old_logprobs": old, "logprobs": -weights.log()}
    for kind, wanted in (("tis", [0.25, 0.5, 1, 2, 2, 2]), ("icepop", [0, 0.5, 1, 2.5, 5, 0])):
        losses = LOSSES["grpo"](old, inputs, {"correction": kind}, _one_row(6))
        # 0.5 and 5 are bounds: exp(log x) may fall a digit outside of them
        inside = [i for i in range(6) if kind == "tis" or i not in (1, 4)]
        assert [-losses[i].item() for i in inside] == pytest.approx([wanted[i] for i in inside], rel=1e-12)


def test_a_row_of_which_gspo_counts_nothing_loses_nothing():
    lp = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    inputs = {"advantages": torch.ones(2), "logprobs": lp - 0.1, "sequence_ratio_mask": torch.zeros(2)}
    assert LOSSES["gspo"](lp, inputs, {}, _one_row(2)).tolist() == [0.0, 0.0]


def test_grpo_without_old_logprobs_has_ratio_one_and_the_policy_gradient():
    lp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    inputs = {"advantages": torch.tensor([1.5, -0.5], dtype=torch.float64)}
    losses = LOSSES["grpo"](lp, inputs, {}, _one_row(2))
    (gradient,) = torch.autograd.grad(losses.sum(), lp)
    assert losses.tolist() == [-1.5, 0.5]
    assert gradient.tolist() == [-1.5, 0.5]


def test_k3_times_the_ratio_has_the_gradient_of_the_kl():
    """Σ p·∇[r·k3] = ∇KL: at ratio 1 each token's gradient is −d = lp − lp_ref."""
    lp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    inputs = {"advantages": torch.zeros(2), "ref_logprobs": torch.tensor([-1.5, -1.0], dtype=torch.float64)}
    config = {"kl": "k3", "kl_coefficient": 1.0, "kl_times_ratio": 1.0}
    (gradient,) = torch.autograd.grad(LOSSES["grpo"](lp, inputs, config, _one_row(2)).sum(), lp)
    assert gradient.tolist() == pytest.approx([0.5, -1.0], rel=1e-12)


def test_k3_keeps_its_digits_near_the_reference():
    lp = torch.tensor([-1.0], dtype=torch.float32)
    inputs = {"advantages": torch.zeros(1), "ref_logprobs": torch.tensor([-1.0 + 2**-12])}
    loss = LOSSES["grpo"](lp, inputs, {"kl": "k3", "kl_coefficient": 1.0}, _one_row(1))
    assert loss.item() == pytest.approx(0.5 * 2.0**-24, rel=1e-3)


@pytest.mark.parametrize(("name", "config"), [("ppo", {}), ("gspo", {}), ("grpo", {}), ("grpo", {"objective": "gspo"})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_overflowing_ratio_is_held_by_the_clip_or_shows_in_the_loss(name, config, dtype):
    """exp(1000) = ∞: a positive advantage is clipped, with a gradient of 0 and never NaN; a negative one
    gives a loss that is not finite, which the trainer refuses."""
    for advantage in (1.0, -1.0):
        lp = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
        inputs = {
            "advantages": torch.tensor([advantage], dtype=dtype),
            "logprobs": torch.tensor([-1001.0], dtype=dtype),
            "old_logprobs": torch.tensor([-1001.0], dtype=dtype),
        }
        losses = LOSSES[name](lp, inputs, config, _one_row(1))
        (gradient,) = torch.autograd.grad(losses.sum(), lp)
        if advantage > 0:
            assert losses.item() == pytest.approx(-1.2)
            assert gradient.item() == 0.0
        else:
            assert losses.item() == float("inf")


@pytest.mark.parametrize(("name", "config"), [("cispo", {}), ("grpo", {"correction": "tis"})])
def test_what_is_capped_stays_finite(name, config):
    lp = torch.tensor([-1.0], requires_grad=True)
    inputs = {"advantages": torch.ones(1), "logprobs": torch.tensor([-1001.0]), "old_logprobs": torch.tensor([-1.0])}
    losses = LOSSES[name](lp, inputs, config, _one_row(1))
    (gradient,) = torch.autograd.grad(losses.sum(), lp)
    assert (losses.item(), gradient.item()) == {"cispo": (4.0, -4.0), "grpo": (-2.0, -2.0)}[name]


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
    with pytest.raises(Fatal, match="unknown loss 'stable_reinforce'; known are cispo, cross_entropy, dpo, dro"):
        loss_named("stable_reinforce", {})


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("ppo", {"clip": 0.2}, "ppo has no setting clip; its settings are: clip_high_threshold, clip_low_threshold"),
        ("cross_entropy", {"beta": 1.0}, "cross_entropy has no setting beta; its settings are: none"),
        ("dro", {}, "dro needs the setting beta"),
        ("dro", {"beta": "high"}, "beta is 'high'; it must be a finite number"),
        ("dpo", {"beta": float("nan")}, "beta is nan; it must be a finite number"),
        ("dpo", {"beta": -0.1}, r"beta is -0\.1; it must be a finite number of at least 0"),
        ("grpo", {"kl": "k4"}, "kl is 'k4'; it may be k1, k2, k3, none"),
        ("grpo", {"objective": 1.0}, "objective is 1.0; it may be cispo, grpo, gspo"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold 1.5 is above clip_high_threshold 1.2"),
    ],
)
def test_a_setting_that_is_none_is_refused(name, config, message):
    with pytest.raises(Fatal, match=message):
        loss_named(name, config)


def test_what_a_loss_needs_follows_its_settings():
    assert loss_named("grpo", {}).needs == {"advantages"}
    assert loss_named("grpo", {"correction": "tis"}).needs == {"advantages", "logprobs"}
    assert loss_named("grpo", {"kl": "k2"}).needs == {"advantages", "ref_logprobs"}
    assert [name for name in LOSSES if LOSSES[name].paired] == ["dpo"]


def test_adamw_equals_pytorchs_optimizer():
    torch.manual_seed(0)
    mine = torch.randn(17)
    theirs = mine.clone().requires_grad_()
    params = AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    optimizer = AdamW(mine, torch.empty(17), torch.empty(17), {}, {})
    for _ in range(5):
        gradients = torch.randn(17)
        theirs.grad = gradients.clone()
        optimizer.step(gradients, params)
        reference.step()
    assert optimizer.step_count == 5
    assert torch.equal(mine, theirs.detach())


def test_clipping_scales_to_the_norm_and_leaves_smaller_ones():
    gradients = torch.tensor([3.0, 4.0])
    assert clip_gradients(gradients, 10.0) == pytest.approx(5.0)
    assert gradients.tolist() == [3.0, 4.0]
    assert clip_gradients(gradients, 1.0) == pytest.approx(5.0)
    assert gradients.tolist() == pytest.approx([0.6, 0.8])
    assert clip_gradients(gradients, 0.0) == pytest.approx(1.0)


def _one_row(length: int) -> Rows:
    return Rows(torch.zeros(length, dtype=torch.long), 1, torch.empty((0, 2), dtype=torch.long))
