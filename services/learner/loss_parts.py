"""What every loss function is given: flat logprobs with parallel inputs, and which row each belongs to.

Invariant: rows are whole; no row, and no pair of rows, is split over two calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
"""Each [N], parallel to the logprobs."""
Config = Mapping[str, float | str]


@dataclass(frozen=True)
class Rows:
    """`row` [N] int64: the row of each flat position, 0 … count−1, ascending. `pairs` [P, 2] int64: (chosen
    row, rejected row), [0, 2] where there are none."""

    row: Tensor
    count: int
    pairs: Tensor

    def sums(self, values: Tensor) -> Tensor:
        """Σ over each row's positions, [N] → [count]; 0 for a row without any."""
        return values.new_zeros(self.count).index_add(0, self.row, values)

    def means(self, values: Tensor, weights: Tensor) -> Tensor:
        """The weighted mean of each row, at each of its positions, [N] → [N]; 0 where all weights are 0."""
        total = self.sums(weights)
        mean = self.sums(values * weights) / torch.where(total == 0, torch.ones_like(total), total)
        return mean[self.row]


def threshold(inputs: Inputs, config: Config, key: str, like: Tensor) -> Tensor:
    """The setting of each position where the rows bring one [N], else the call's [scalar]."""
    given = inputs.get(key)
    return like.new_tensor(float(config[key])) if given is None else given
