"""Policy-gradient losses: logprobs with advantages in, per-token losses out, without coefficients.

q is the sampler's logprob (input `logprobs`), lp_old the learner's own before the record's first step
(input `old_logprobs`; absent = sg(lp), one step per record), sg(·) stops the gradient.
Invariant: where a ratio overflows, either the clip holds it and the gradient is 0, or the loss is not
finite and the trainer refuses the row; it never becomes a NaN gradient under a finite loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.learner.loss_parts import Config, Inputs, Rows, threshold


def importance_sampling(lp: Tensor, inputs: Inputs, config: Config, rows: Rows) -> Tensor:
    """ℓ = −r·A, r = exp(lp − q)."""
    return -torch.exp(lp - inputs["logprobs"]) * inputs["advantages"]


def ppo(lp: Tensor, inputs: Inputs, config: Config, rows: Rows) -> Tensor:
    """ℓ = −min(r·A, clip(r, low, high)·A), r = exp(lp − q), thresholds absolute (arXiv:1707.06347, eq. 7)."""
    return clipped(lp - inputs["logprobs"], inputs["advantages"], *_thresholds(lp, inputs, config))


def cispo(lp: Tensor, inputs: Inputs, config: Config, rows: Rows) -> Tensor:
    """ℓ = −sg(clip(r, low, high))·lp·A, r = exp(lp − q), thresholds absolute (arXiv:2506.13585)."""
    return weighted_logprob(lp, lp - inputs["logprobs"], inputs["advantages"], *_thresholds(lp, inputs, config))


def dro(lp: Tensor, inputs: Inputs, config: Config, rows: Rows) -> Tensor:
    """ℓ = −(lp·A − ½β(lp − q)²) (arXiv:2405.19107)."""
    distance = lp - inputs["logprobs"]
    return 0.5 * float(config["beta"]) * distance**2 - lp * inputs["advantages"]


def gspo(lp: Tensor, inputs: Inputs, config: Config, rows: Rows) -> Tensor:
    """The sequence's ratio s = exp(mean of lp − q), clipped like `ppo`, with each token's own gradient
    (GSPO-token, arXiv:2507.18071, §4.3): s_t = sg(s)·exp(lp − sg(lp)).

    The mean and the loss are over the positions where `sequence_ratio_mask` is not 0, all of the row's
    without it; elsewhere ℓ = 0."""
    counted = inputs.get("sequence_ratio_mask")
    log_ratio = sequence_log_ratio(lp, inputs["logprobs"], rows, counted)
    losses = clipped(log_ratio, inputs["advantages"], *_thresholds(lp, inputs, config))
    return losses if counted is None else torch.where(counted != 0, losses, torch.zeros_like(losses))


def grpo(lp: Tensor, inputs: Inputs, config: Config, rows: Rows) -> Tensor:
    """ℓ = w·policy + coefficient·KL, r = exp(lp − lp_old), clipped to [1 − clip_low, 1 + clip_high].

    policy, by `objective`: `grpo` −min(r·A, clip(r)·A) (arXiv:2402.03300, eq. 3; low and high apart:
    arXiv:2503.14476), `cispo` −sg(clip(r))·lp·A (arXiv:2506.13585), `gspo` like `grpo` with the ratio of
    the sequence (arXiv:2507.18071). w = `mismatch_weight`. KL with d = lp_ref − lp, by `kl`: `k1` puts
    A − coefficient·sg(−d) in place of A; `k2` is ½d² and `k3` e^d − d − 1
    (http://joschu.net/blog/kl-approx.html), times r where `kl_times_ratio` is 1 (arXiv:2512.02556)."""
    old = inputs.get("old_logprobs", lp.detach())
    log_ratio, advantages, low, high = _surrogate(lp, inputs, config, rows)
    if config["objective"] == "cispo":
        losses = weighted_logprob(lp, log_ratio, advantages, low, high)
    else:
        losses = clipped(log_ratio, advantages, low, high)
    if config["correction"] != "none":
        losses = losses * mismatch_weight(old - inputs["logprobs"], config)
    if config["kl"] in ("k2", "k3"):
        losses = losses + float(config["kl_coefficient"]) * _divergence(lp, old, inputs["ref_logprobs"], config)
    return losses


@torch.no_grad()
def grpo_held(lp: Tensor, inputs: Inputs, config: Config, rows: Rows) -> Tensor:
    """Which positions the clip of `grpo` holds, [N] bool: no gradient comes from them, or (`cispo`) their
    weight is another than their ratio."""
    log_ratio, advantages, low, high = _surrogate(lp, inputs, config, rows)
    ratio = torch.exp(log_ratio)
    return (ratio < low) | (ratio > high) if config["objective"] == "cispo" else _held(ratio, advantages, low, high)


def _surrogate(lp: Tensor, inputs: Inputs, config: Config, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log ratio, advantages, lower and upper bound of `grpo` with these settings."""
    old = inputs.get("old_logprobs", lp.detach())
    log_ratio = sequence_log_ratio(lp, old, rows) if config["objective"] == "gspo" else lp - old
    advantages = inputs["advantages"]
    if config["kl"] == "k1":
        advantages = advantages + float(config["kl_coefficient"]) * (inputs["ref_logprobs"] - lp.detach())
    low, high = 1.0 - float(config["clip_low"]), 1.0 + float(config["clip_high"])
    return log_ratio, advantages, lp.new_tensor(low), lp.new_tensor(high)


def clipped(log_ratio: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """−min(r·A, clip(r, low, high)·A), r = exp(log_ratio) [N]; no gradient where the clip is the smaller."""
    with torch.no_grad():
        ratio = torch.exp(log_ratio)
        bound, held = ratio.clamp(low, high) * advantages, _held(ratio, advantages, low, high)
    # the ratio of a held token is never computed with a gradient: 0·∞ would be NaN in the backward pass
    free = torch.exp(log_ratio.masked_fill(held, 0.0)) * advantages
    return -torch.where(held, bound, free)


def _held(ratio: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return ratio * advantages > ratio.clamp(low, high) * advantages


def weighted_logprob(lp: Tensor, log_ratio: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """−sg(clip(r, low, high))·lp·A."""
    return -torch.exp(log_ratio.detach()).clamp(low, high) * lp * advantages


def sequence_log_ratio(lp: Tensor, old: Tensor, rows: Rows, mask: Tensor | None = None) -> Tensor:
    """log s_t [N]: the value of its row's mean of lp − old where `mask` is not 0, the gradient of lp_t alone."""
    distance = lp.detach() - old
    mean = rows.means(distance, torch.ones_like(lp) if mask is None else (mask != 0).to(lp.dtype))
    return mean + (lp - lp.detach())


def mismatch_weight(log_weight: Tensor, config: Config) -> Tensor:
    """w = sg(exp(lp_old − q)), the engine's distribution against the learner's: `tis` min(w, cap)
    (https://fengyao.notion.site/off-policy-rl), `icepop` w where low ≤ w ≤ high, else 0 (arXiv:2510.18855)."""
    weight = torch.exp(log_weight.detach())
    if config["correction"] == "tis":
        return weight.clamp(max=float(config["correction_cap"]))
    inside = (weight >= float(config["correction_low"])) & (weight <= float(config["correction_high"]))
    return weight.masked_fill(~inside, 0.0)


def _divergence(lp: Tensor, old: Tensor, reference: Tensor, config: Config) -> Tensor:
    d = reference - lp
    if config["kl"] == "k2":
        return 0.5 * d**2
    # expm1 keeps the digits that e^d − 1 − d loses where d is small
    k3 = torch.expm1(d) - d
    return k3 * torch.exp(lp - old) if float(config["kl_times_ratio"]) else k3


def _thresholds(lp: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Tensor]:
    return threshold(inputs, config, "clip_low_threshold", lp), threshold(inputs, config, "clip_high_threshold", lp)
