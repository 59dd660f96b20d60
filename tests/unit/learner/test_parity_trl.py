"""Loss and gradient equal TRL's in float64, on random ragged batches: GRPO with its variants, and DPO.

TRL's losses are called on a stub whose model answers with our logprobs, so that nothing but the loss is
compared. Where the two differ in what they aggregate over, the coefficients say so."""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from services.learner.losses import loss_named, trajectory_coefficients
from tests.unit.learner.formulas import flatten, random_rows

with warnings.catch_warnings():
    # TRL says which vLLM it was tested with
    warnings.simplefilter("ignore")
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer

NAMES = ("advantages", "logprobs", "old_logprobs", "ref_logprobs")
MAX_TOKENS = 16
ACCELERATOR = SimpleNamespace(
    num_processes=1,
    device="cpu",
    gather=lambda tensor: tensor,
    gather_for_metrics=lambda tensor: tensor,
    reduce=lambda tensor, reduction: tensor,
)

BASE = {"clip_low": 0.2, "clip_high": 0.28}
KL = {"kl": "k3", "kl_coefficient": 0.3}
# TRL's CISPO has no lower bound, and its upper one is absolute
CISPO = {"objective": "cispo", "clip_low": 1.0, "clip_high": 0.3}
VARIANTS = {
    "grpo": ("grpo", BASE, {"loss_type": "grpo"}),
    "grpo one clip": ("grpo", {}, {"loss_type": "grpo", "epsilon_high": 0.2}),
    "bnpo": ("token", BASE, {"loss_type": "bnpo"}),
    "dapo": ("token", BASE, {"loss_type": "dapo"}),
    "dr_grpo": ("dr_grpo", BASE, {"loss_type": "dr_grpo"}),
    "cispo": ("token", CISPO, {"loss_type": "cispo", "epsilon_high": 1.3}),
    "sequence": ("grpo", BASE | {"objective": "gspo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "sequence, tokens": (
        "token",
        {"objective": "gspo", "clip_low": 0.03, "clip_high": 0.04},
        {"loss_type": "dapo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
    ),
    "tis": ("grpo", BASE | {"correction": "tis"}, {"loss_type": "grpo", "correction": "tis"}),
    "icepop": ("token", BASE | {"correction": "icepop"}, {"loss_type": "dapo", "correction": "icepop"}),
    "k3": ("grpo", BASE | KL, {"loss_type": "grpo", "beta": 0.3}),
    "k3 times ratio": (
        "grpo",
        BASE | KL | {"kl_times_ratio": 1.0},
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": True},
    ),
    "all together": (
        "dr_grpo",
        BASE | KL | {"kl_times_ratio": 1.0, "correction": "tis"},
        {"loss_type": "dr_grpo", "beta": 0.3, "use_bias_correction_kl": True, "correction": "tis"},
    ),
}


@pytest.mark.parametrize("with_old", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", VARIANTS)
def test_grpo_and_its_variants_equal_trls_loss(variant, seed, with_old):
    aggregation, config, settings = VARIANTS[variant]
    rows = random_rows(seed, names=NAMES, spread=0.7)
    for row in rows:
        # an advantage is the trajectory's, the same for each of its tokens
        row.inputs["advantages"] = [row.kept(row.inputs["advantages"])[0]] * len(row.mask)
    names = NAMES if with_old else tuple(name for name in NAMES if name != "old_logprobs")
    lp, inputs, _, structure = flatten(rows, names)
    loss = (_coefficients(rows, aggregation) * loss_named("grpo", config)(lp, inputs, config, structure)).sum()
    (gradient,) = torch.autograd.grad(loss, lp)
    theirs, their_gradient = _trl_grpo(rows, names, settings)
    assert loss.item() == pytest.approx(theirs, rel=1e-9)
    assert gradient.tolist() == pytest.approx(their_gradient, rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_dpo_equals_trls_loss(seed, beta):
    rows = random_rows(seed, names=("ref_logprobs",), spread=0.7)
    lp, inputs, _, structure = flatten(rows, ("ref_logprobs",))
    loss = loss_named("dpo", {"beta": beta})(lp, inputs, {"beta": beta}, structure).sum() / len(structure.pairs)
    (gradient,) = torch.autograd.grad(loss, lp)
    theirs, their_gradient = _trl_dpo(rows, beta)
    assert loss.item() == pytest.approx(theirs, rel=1e-9)
    assert gradient.tolist() == pytest.approx(their_gradient, rel=1e-9, abs=1e-13)


def _coefficients(rows, aggregation):
    lengths = [sum(row.mask) for row in rows]
    weights = trajectory_coefficients(lengths, aggregation, MAX_TOKENS)
    per_token = [w for w, n in zip(weights, lengths, strict=True) for _ in range(n)]
    return torch.tensor(per_token, dtype=torch.float64)


def _padded(arrays):
    longest = max(map(len, arrays))
    return torch.tensor([list(array) + [0.0] * (longest - len(array)) for array in arrays], dtype=torch.float64)


def _trl_grpo(rows, names, settings):
    leaf = _padded([row.lp for row in rows]).requires_grad_()
    mask = _padded([row.mask for row in rows])
    arrays = {name: _padded([row.inputs[name] for row in rows]) for name in names}
    inputs = {
        "prompt_ids": torch.zeros((len(rows), 1), dtype=torch.long),
        "prompt_mask": torch.ones((len(rows), 1), dtype=torch.long),
        "completion_ids": torch.zeros_like(mask, dtype=torch.long),
        "completion_mask": mask,
        "advantages": arrays["advantages"][:, 0],
        "ref_per_token_logps": arrays["ref_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    old = arrays.get("old_logprobs", leaf.detach())
    if "old_logprobs" in arrays:
        inputs["old_per_token_logps"] = old
    correction = settings.get("correction")
    if correction:
        inputs["importance_sampling_ratio"] = _trl_ratio(old - arrays["logprobs"], correction)
    stub = _grpo_stub(settings, leaf, vllm=bool(correction))
    loss = GRPOTrainer._compute_loss(stub, None, inputs)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient[mask.bool()].tolist()


def _trl_ratio(difference, correction):
    """As TRL makes it of its sampler's logprobs: truncated (`token_truncate`), or masked (`token_mask`)."""
    ratio = torch.exp(difference)
    if correction == "tis":
        return torch.clamp(ratio, max=2.0)
    return ratio.masked_fill((ratio < 0.5) | (ratio > 5.0), 0.0)


def _grpo_stub(settings, leaf, vllm):
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.zeros_like(leaf), None),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        accelerator=ACCELERATOR,
        args=SimpleNamespace(
            use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
            delta=None,
            steps_per_generation=1,
        ),
        aux_loss_enabled=False,
        beta=settings.get("beta", 0.0),
        current_gradient_accumulation_steps=1,
        epsilon_high=settings.get("epsilon_high", 0.28),
        epsilon_low=settings.get("epsilon_low", 0.2),
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        loss_type=settings["loss_type"],
        max_completion_length=MAX_TOKENS,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=vllm,
        vllm_importance_sampling_correction=vllm,
    )


def _trl_dpo(rows, beta):
    # TRL wants all chosen rows first, one position before the first logprob, and 0 where a label is masked
    order = [*range(0, len(rows), 2), *range(1, len(rows), 2)]
    masks = _padded([row.mask for row in rows])
    leaf = (_padded([row.lp for row in rows]) * masks).requires_grad_()
    reference = (_padded([row.inputs["ref_logprobs"] for row in rows]) * masks).sum(dim=1)
    mask = torch.cat([torch.zeros((len(rows), 1)), masks], dim=1)[order]
    inputs = {
        "input_ids": torch.zeros_like(mask, dtype=torch.long),
        "attention_mask": torch.ones_like(mask, dtype=torch.long),
        "completion_mask": mask.long(),
        "ref_chosen_logps": reference[order][: len(rows) // 2],
        "ref_rejected_logps": reference[order][len(rows) // 2 :],
    }
    picked = leaf[order]
    zeros = torch.zeros_like(picked)
    outputs = SimpleNamespace(log_probs=picked, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    stub = SimpleNamespace(
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        accelerator=ACCELERATOR,
        aux_loss_enabled=False,
        beta=beta,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        model=SimpleNamespace(training=True),
        precompute_ref_logps=True,
        use_weighting=False,
    )
    loss = DPOTrainer._compute_loss(stub, lambda **_: outputs, inputs, return_outputs=False)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient[masks.bool()].tolist()


def test_the_stub_compares_something():
    """The same batch under another clip is another loss, so that equality above means something."""
    rows = random_rows(1, names=NAMES, spread=0.7)
    for row in rows:
        row.inputs["advantages"] = [row.kept(row.inputs["advantages"])[0]] * len(row.mask)
    wide, _ = _trl_grpo(rows, NAMES, {"loss_type": "grpo"})
    tight, _ = _trl_grpo(rows, NAMES, {"loss_type": "grpo", "epsilon_high": 0.01, "epsilon_low": 0.01})
    assert abs(wide - tight) > 1e-3
