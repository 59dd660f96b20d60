"""The losses by name, with what each needs and may be told; and the coefficients that sum them.

Every loss of a step is Σ_t c_t·ℓ_t. Invariant: c_t comes from the whole step, never from a micro-batch,
so that loss and gradient do not depend on how a step is cut.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from services.learner import policy_losses, preference
from services.learner.loss_parts import Config, Inputs, Rows
from shared.errors import Fatal

__all__ = ["LOSSES", "Config", "Inputs", "Loss", "Rows", "loss_named", "trajectory_coefficients"]


@dataclass(frozen=True)
class Loss:
    """`needs`: the inputs that a row must bring. `defaults`: the settings that may be left out, `required`:
    those that may not, `choices`: what a textual one may be. `paired`: it is one loss a pair of rows."""

    function: Callable[[Tensor, Inputs, Config, Rows], Tensor]
    needs: frozenset[str]
    defaults: Config = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    choices: Mapping[str, frozenset[str]] = field(default_factory=dict)
    paired: bool = False

    def __call__(self, lp: Tensor, inputs: Inputs, config: Config, rows: Rows) -> Tensor:
        """ℓ [N] of the logprobs [N], without coefficients; the inputs are parallel to them."""
        return self.function(lp, inputs, {**self.defaults, **config}, rows)


def _cross_entropy(lp: Tensor, inputs: Inputs, config: Config, rows: Rows) -> Tensor:
    """ℓ = −w·lp."""
    return -inputs["weights"] * lp


_SAMPLED = frozenset({"logprobs", "advantages"})

LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(_cross_entropy, frozenset({"weights"})),
    "importance_sampling": Loss(policy_losses.importance_sampling, _SAMPLED),
    "ppo": Loss(policy_losses.ppo, _SAMPLED, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Loss(policy_losses.cispo, _SAMPLED, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Loss(policy_losses.dro, _SAMPLED, required=frozenset({"beta"})),
    "gspo": Loss(policy_losses.gspo, _SAMPLED, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "grpo": Loss(
        policy_losses.grpo,
        frozenset({"advantages"}),
        {
            "objective": "grpo", "clip_low": 0.2, "clip_high": 0.2,
            "correction": "none", "correction_cap": 2.0, "correction_low": 0.5, "correction_high": 5.0,
            "kl": "none", "kl_coefficient": 0.0, "kl_times_ratio": 0.0,
        },
        choices={
            "objective": frozenset({"grpo", "cispo", "gspo"}),
            "correction": frozenset({"none", "tis", "icepop"}),
            "kl": frozenset({"none", "k1", "k2", "k3"}),
        },
    ),
    "dpo": Loss(preference.dpo, frozenset({"ref_logprobs"}), {"beta": 0.1}, paired=True),
}  # fmt: skip


def loss_named(name: str, config: Config) -> Loss:
    """The loss, needing what these settings of it need.

    Raises Fatal, saying what is known, for an unknown loss, an unknown or missing setting, or a bad value."""
    loss = LOSSES.get(name)
    if loss is None:
        raise Fatal(f"unknown loss {name!r}; known are {', '.join(sorted(LOSSES))}")
    known = loss.defaults.keys() | loss.required
    unknown = config.keys() - known
    if unknown:
        listed = ", ".join(sorted(known)) or "none"
        raise Fatal(f"loss {name} has no setting {', '.join(sorted(unknown))}; its settings are: {listed}")
    missing = loss.required - config.keys()
    if missing:
        raise Fatal(f"loss {name} needs the setting {', '.join(sorted(missing))}, which has no default")
    settings = {**loss.defaults, **config}
    for key, value in settings.items():
        _check_setting(name, key, value, loss.choices.get(key))
    _check_order(name, settings)
    return dataclasses.replace(loss, needs=loss.needs | _more_needs(settings))


def _check_setting(name: str, key: str, value: float | str, choices: frozenset[str] | None) -> None:
    if choices is not None:
        if value not in choices:
            raise Fatal(f"loss {name}: {key} is {value!r}; it may be {', '.join(sorted(choices))}")
    elif isinstance(value, str) or not math.isfinite(value) or value < 0:
        raise Fatal(f"loss {name}: {key} is {value!r}; it must be a finite number of at least 0")


def _check_order(name: str, settings: Config) -> None:
    for low, high in (("clip_low_threshold", "clip_high_threshold"), ("correction_low", "correction_high")):
        if low in settings and float(settings[low]) > float(settings[high]):
            raise Fatal(f"loss {name}: {low} {settings[low]} is above {high} {settings[high]}")


def _more_needs(settings: Config) -> frozenset[str]:
    corrected = settings.get("correction", "none") != "none"
    referred = settings.get("kl", "none") != "none"
    return frozenset({"logprobs"} if corrected else ()) | frozenset({"ref_logprobs"} if referred else ())


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
