"""Direct preference optimisation: pairs of rows in, one loss a pair out.

Invariant: Σ c·ℓ with c = 1/pairs on every position of a pair's rows is the mean over the pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from services.learner.loss_parts import Config, Inputs, Rows


def dpo(lp: Tensor, inputs: Inputs, config: Config, rows: Rows) -> Tensor:
    """−log σ(β·[(lp − ref)_chosen − (lp − ref)_rejected]), each summed over its row (arXiv:2305.18290, eq. 7).

    A pair's loss stands at the first position of its chosen row, 0 elsewhere."""
    distance = rows.sums(lp - inputs["ref_logprobs"])
    chosen, rejected = rows.pairs.unbind(1)
    losses = -logsigmoid(float(config["beta"]) * (distance[chosen] - distance[rejected]))
    return torch.zeros_like(lp).index_add(0, torch.searchsorted(rows.row, chosen.contiguous()), losses)
