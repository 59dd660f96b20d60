"""AdamW over a slot's flat buffers: parameters and gradients in, parameters changed in place; moments kept.

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
    """arXiv:1711.05101, decoupled weight decay, bias-corrected moments in the parameters' dtype.

    `parameters`, `first_moment`, `second_moment`: [n] each; `first` and `second` name stretches of the
    moments."""

    def __init__(
        self,
        parameters: Tensor,
        first_moment: Tensor,
        second_moment: Tensor,
        first: Mapping[str, Tensor],
        second: Mapping[str, Tensor],
    ) -> None:
        self._parameters, self._first, self._second = parameters, first_moment, second_moment
        self.first, self.second = first, second
        self.reset()

    def reset(self) -> None:
        """Moments of zero, step 0."""
        self._first.zero_()
        self._second.zero_()
        self.step_count = 0

    @torch.no_grad()
    def step(self, gradients: Tensor, params: AdamParams) -> None:
        """`gradients` [n]."""
        adamw(
            [self._parameters],
            [gradients],
            [self._first],
            [self._second],
            [],
            [torch.tensor(float(self.step_count))],
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
def clip_gradients(gradients: Tensor, max_norm: float) -> float:
    """Scale [n] in place to a norm of at most `max_norm` (0 = leave). Returns the norm before."""
    norm = float(torch.linalg.vector_norm(gradients))
    if max_norm and norm > max_norm:
        gradients.mul_(max_norm / norm)
    return norm
