"""The loss functions: per-token logprobs in, per-token losses out; and the coefficients that sum them.

Every loss of a step is Σ_t c_t·ℓ_t. Invariant: c_t comes from the whole step, never from a micro-batch,
so that loss and gradient do not depend on how a step is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.errors import Fatal

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


def _cross_entropy(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -inputs["weights"] * lp


def _importance_sampling(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -torch.exp(lp - inputs["logprobs"]) * inputs["advantages"]


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def _ppo(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio = torch.exp(lp - inputs["logprobs"])
    return _clipped(ratio, inputs["advantages"], config["clip_low_threshold"], config["clip_high_threshold"])


def _grpo(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    old = inputs.get("old_logprobs")
    ratio = torch.exp(lp - (lp.detach() if old is None else old))
    return _clipped(ratio, inputs["advantages"], 1.0 - config["clip_low"], 1.0 + config["clip_high"])


@dataclass(frozen=True)
class Loss:
    """`needs`: the inputs that a datum must bring. `defaults`: its configuration keys, all of them."""

    function: Callable[[Tensor, Inputs, Config], Tensor]
    needs: frozenset[str]
    defaults: Config = field(default_factory=dict)

    def __call__(self, lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
        """ℓ, shape of `lp` [N]; N flat positions, the inputs parallel to them."""
        return self.function(lp, inputs, {**self.defaults, **config})


_SAMPLED = frozenset({"logprobs", "advantages"})

# r = exp(lp − q), q the sampler's logprob (the Tinker losses):
#   cross_entropy        ℓ = −w·lp
#   importance_sampling  ℓ = −r·A
#   ppo                  ℓ = −min(r·A, clip(r, low, high)·A), thresholds absolute (arXiv:1707.06347)
# r = exp(lp − lp_old), lp_old the learner's own logprob before the record's first step, sg(lp) if absent:
#   grpo                 ℓ = −min(r·A, clip(r, 1 − low, 1 + high)·A) (arXiv:2402.03300, 2503.14476)
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(_cross_entropy, frozenset({"weights"})),
    "importance_sampling": Loss(_importance_sampling, _SAMPLED),
    "ppo": Loss(_ppo, _SAMPLED, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "grpo": Loss(_grpo, frozenset({"advantages"}), {"clip_low": 0.2, "clip_high": 0.2}),
}


def loss_named(name: str, config: Config) -> Loss:
    """Raises Fatal, saying what is known, for an unknown loss or configuration key."""
    loss = LOSSES.get(name)
    if loss is None:
        raise Fatal(f"unknown loss {name!r}; known are {', '.join(sorted(LOSSES))}")
    unknown = config.keys() - loss.defaults.keys()
    if unknown:
        known = ", ".join(sorted(loss.defaults)) or "none"
        raise Fatal(f"loss {name} has no setting {', '.join(sorted(unknown))}; its settings are: {known}")
    return loss


def trajectory_coefficients(lengths: Sequence[int], aggregation: str, max_tokens: int) -> list[float]:
    """c of each token of each of the B trajectories, from their lengths |y| alone.

    `grpo` 1/(B·|y|) (arXiv:2402.03300), `token` 1/Σ|y| (DAPO, arXiv:2503.14476), `dr_grpo`
    1/(B·max_tokens) (arXiv:2503.20783). Masked tokens are in no length. Raises ValueError for another name."""
    count = len(lengths)
    if aggregation == "grpo":
        return [1.0 / (count * length) if length else 0.0 for length in lengths]
    if aggregation == "token":
        return [1.0 / max(sum(lengths), 1)] * count
    if aggregation == "dr_grpo":
        return [1.0 / (count * max_tokens) for _ in lengths]
    raise ValueError(f"unknown aggregation {aggregation!r}; known are grpo, token, dr_grpo")
