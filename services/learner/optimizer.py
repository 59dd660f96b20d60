"""AdamW over named tensors: parameters and gradients in, parameters changed in place; moments are kept.

The arithmetic is PyTorch's functional `adamw`; what is ours is that the moments have names, so that a
training checkpoint can hold them. Invariant: one call is one step, and nothing else moves the moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw


@dataclass(frozen=True)
class AdamParams:
    """One step's settings. `grad_clip_norm` 0 = no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class AdamW:
    """arXiv:1711.05101, decoupled weight decay, bias-corrected moments in the parameters' dtype."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self.reset()

    def reset(self) -> None:
        """Moments of zero, step 0."""
        self.first = {name: torch.zeros_like(p, requires_grad=False) for name, p in self._parameters.items()}
        self.second = {name: torch.zeros_like(p, requires_grad=False) for name, p in self._parameters.items()}
        self.step_count = 0

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], params: AdamParams) -> None:
        names = list(self._parameters)
        count = [torch.tensor(float(self.step_count)) for _ in names]
        adamw(
            [self._parameters[name] for name in names],
            [gradients[name] for name in names],
            [self.first[name] for name in names],
            [self.second[name] for name in names],
            [],
            count,
            foreach=False,
            amsgrad=False,
            beta1=params.beta1,
            beta2=params.beta2,
            lr=params.learning_rate,
            weight_decay=params.weight_decay,
            eps=params.eps,
            maximize=False,
        )
        self.step_count += 1


@torch.no_grad()
def clip_gradients(gradients: Mapping[str, Tensor], max_norm: float) -> float:
    """Scale in place to a global norm of at most `max_norm` (0 = leave). Returns the norm before."""
    tensors = list(gradients.values())
    norm = float(torch.nn.utils.get_total_norm(tensors))
    if max_norm and norm > max_norm:
        for tensor in tensors:
            tensor.mul_(max_norm / norm)
    return norm
