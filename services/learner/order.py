"""Which rows of a data set a step takes.

Invariant: a function of (purpose, seed, step, size) alone, and every row comes once before any comes twice.
"""

from __future__ import annotations

from shared.errors import Fatal
from shared.tasks.permutation import Permutation


def step_positions(size: int, purpose: str, seed: int, step: int, count: int) -> list[int]:
    """The `count` indices of step `step` (1-based): the next of an endless sequence of epochs over
    0 … size−1, each shuffled anew. Raises Fatal for an empty data set."""
    if size == 0:
        raise Fatal("the training data has no rows")
    first = (step - 1) * count
    epochs = range(first // size, (first + count - 1) // size + 1)
    shuffled = {epoch: Permutation(size, f"{purpose}|{seed}|{epoch}") for epoch in epochs}
    return [shuffled[at // size][at % size] for at in range(first, first + count)]
