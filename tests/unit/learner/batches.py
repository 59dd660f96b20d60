"""Random ragged batches for each loss, and how far two gradients are apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.learner.datum import Datum
from services.learner.heads import LossCall
from services.learner.slots import Slot

VOCABULARY = 49152

CALLS = {
    "cross_entropy": LossCall("cross_entropy"),
    "importance_sampling": LossCall("importance_sampling", temperature=0.7),
    "grpo": LossCall("grpo", {"kl": "k3", "kl_coefficient": 0.3, "correction": "tis"}, temperature=0.6),
    "gspo": LossCall("gspo"),
    "dpo": LossCall("dpo", {"beta": 0.4}),
}
INPUTS = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("advantages", "logprobs"),
    "grpo": ("advantages", "logprobs", "old_logprobs", "ref_logprobs"),
    "gspo": ("advantages", "logprobs"),
    "dpo": ("ref_logprobs",),
}


def go_on() -> None:
    return None


def batch(loss: str, lengths: tuple[int, ...], seed: int = 0, vocabulary: int = VOCABULARY) -> list[Datum]:
    """Rows of the lengths given, each with some masked positions; for `dpo` neighbours are pairs.

    What stands for a logprob is near that of a random model, so that no ratio is far from 1."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def drawn(name: str, length: int) -> tuple[float, ...]:
        noise = torch.randn(length, generator=generator, dtype=torch.float64) * 0.1
        shift = {"weights": 1.0, "advantages": 0.0}.get(name, -math.log(vocabulary))
        return tuple((noise * (10.0 if name == "advantages" else 1.0) + shift).tolist())

    rows = []
    for number, length in enumerate(lengths):
        ids = torch.randint(3, vocabulary, (length + 1,), generator=generator).tolist()
        taken = (torch.rand(length, generator=generator) < 0.7).tolist()
        taken[-1] = True
        coefficients = torch.rand(length, generator=generator, dtype=torch.float64) / total
        if loss == "dpo":
            coefficients = torch.full((length,), 2.0 / len(lengths), dtype=torch.float64)
        inputs = {name: drawn(name, length) for name in INPUTS[loss]}
        rows.append(
            Datum(
                name=f"row{number}", input_ids=tuple(ids[:-1]), targets=tuple(ids[1:]), mask=tuple(taken),
                inputs=inputs, coefficients=tuple(coefficients.tolist()),
                pair=f"pair{number // 2}" if loss == "dpo" else "",
            )
        )  # fmt: skip
    return rows


@torch.no_grad()
def shake(slot: Slot, seed: int = 9, size: float = 0.05) -> Slot:
    """Make every tensor of the adapter matter, B too."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in slot.parameters.items():
        if ".lora_B." in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * size)
    return slot


def relative_l2(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())
