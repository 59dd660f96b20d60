"""The learning rate of each step of a run: linear warm-up, then constant, linear or cosine.

Invariant: a function of (settings, step, steps) alone, so that a resumed run goes on where it was.
"""

from __future__ import annotations

import math

from mint_schemas.training import Optimizer


def learning_rate(optimizer: Optimizer, step: int, steps: int) -> float:
    """Of step k (1-based) of n, with w warm-up steps and peak lr.

    k ≤ w: lr·k/w, so that no step is wasted at 0. After that lr·(f + (1 − f)·g(p)), f = `final_ratio`,
    p = (k − 1 − w)/(n − w), g = 1 (constant, whatever f), 1 − p (linear) or ½(1 + cos πp) (cosine,
    arXiv:1608.03983, eq. 5). The first step after the warm-up has the peak; f is reached when the last step
    is over, so that the last step is never at 0 unless lr is. After the warm-up these are Transformers'
    schedules of n steps at index k − 1. Raises ValueError for a step outside 1 … n."""
    if not 1 <= step <= steps:
        raise ValueError(f"step {step} is outside the run's 1 … {steps}")
    peak, warmup = optimizer.learning_rate, optimizer.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if optimizer.schedule == "constant":
        return peak
    progress = (step - 1 - warmup) / (steps - warmup)
    falling = 1.0 - progress if optimizer.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (optimizer.final_ratio + (1.0 - optimizer.final_ratio) * falling)
