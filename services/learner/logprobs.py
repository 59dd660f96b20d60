"""Log-probabilities of chosen tokens, a few rows at a time, so that no [N, vocabulary] of fp32 is made.

Logits of any precision in, fp32 (or, from float64, float64) logprobs out, with their gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_NUMBERS = 1 << 22
"""How many logits are held in full precision at a time."""


def target_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature)[target]: logits [N, V], K targets of each [N·K] → [N·K]."""
    result: Tensor = _TargetLogprobs.apply(logits, targets.view(len(logits), -1), temperature)
    return result.flatten()


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        precise = torch.promote_types(logits.dtype, torch.float32)
        chosen = torch.empty(targets.shape, dtype=precise, device=logits.device)
        normaliser = torch.empty(len(logits), dtype=precise, device=logits.device)
        for part in parts(logits):
            scaled = logits[part].to(precise) / temperature
            normaliser[part] = torch.logsumexp(scaled, dim=-1)
            chosen[part] = scaled.gather(1, targets[part]) - normaliser[part, None]
        ctx.save_for_backward(logits, targets, normaliser)
        ctx.temperature = temperature
        return chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """d lp/d logit_v = (1[v = target] − p_v) / T."""
        (gradient,) = gradients
        logits, targets, normaliser = ctx.saved_tensors
        result = torch.empty_like(logits)
        weight = gradient / ctx.temperature
        for part in parts(logits):
            scaled = logits[part].to(normaliser.dtype) / ctx.temperature
            slope = scaled.sub_(normaliser[part, None]).exp_().mul_(-weight[part].sum(dim=1, keepdim=True))
            slope.scatter_add_(1, targets[part], weight[part])
            result[part] = slope
        return result, None, None


def parts(logits: Tensor) -> Iterator[slice]:
    """Stretches of the rows of [N, V] that are worked on at a time."""
    rows = max(1, CHUNK_NUMBERS // logits.shape[1])
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)
