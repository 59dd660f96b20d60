"""LoRA by slot against the sum written row by row: ragged groups and ranks, rows without LoRA, both ways."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
WIDTHS, INNER, MAX_RANK = (5, 2, 7), 6, 4
DECODING = [0, 1, 2, 1, 0, 2, 2, 1]


@pytest.fixture(scope="module")
def grouped() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the package imports
        from shared.engine.vllm import grouped
    return grouped


def stacks(slots: int, ranks: dict[int, int]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Zero beyond each adapter's rank, as vLLM stacks them."""
    a = tuple(torch.randn(slots, 1, MAX_RANK, INNER, dtype=torch.float64) for _ in WIDTHS)
    b = tuple(torch.randn(slots, 1, width, MAX_RANK, dtype=torch.float64) for width in WIDTHS)
    for slot, rank in ranks.items():
        for first, second in zip(a, b, strict=True):
            first[slot, 0, rank:] = 0
            second[slot, 0, :, rank:] = 0
    return a, b


@pytest.mark.parametrize(
    ("slots", "together"),
    [
        ([], False),
        ([-1, -1], False),
        ([1, 1, 1], False),
        (DECODING, True),
        ([3, 1, 1, 3], True),  # slots that are no neighbours
        ([-1, 2, 0, -1, 2, 0, 0, -1], True),
        ([2] * 100 + [0, 1], False),  # a long prompt beside two that decode
        ([0] * 60 + [1] * 60 + [-1], True),
    ],
)
def test_it_is_the_sum_over_each_rows_adapter(grouped: Any, slots: list[int], together: bool) -> None:
    """vllm#48421: index −1, used as a row, is the last slot."""
    torch.manual_seed(0)
    indices, ranks = torch.tensor(slots, dtype=torch.long), {0: 2, 1: 4, 2: 3, 3: 1}
    how = grouped.plan(indices, ranks.__getitem__)
    assert isinstance(how, grouped.Together) is together
    a, b = stacks(4, ranks)
    x = torch.randn(len(slots), INNER, dtype=torch.float64)
    before = torch.randn(len(slots), sum(WIDTHS), dtype=torch.float64)
    y = before.clone()
    grouped.add_lora(y, x, a, b, 0.5, how)
    for row, slot in enumerate(slots):
        wanted, at = before[row].clone(), 0
        for first, second, width in zip(a, b, WIDTHS, strict=True):
            if slot >= 0:
                wanted[at : at + width] += 0.5 * (second[slot, 0] @ (first[slot, 0] @ x[row]))
            at += width
        assert torch.allclose(y[row], wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(y[indices == -1], before[indices == -1])


def test_another_adapter_in_the_batch_reaches_no_other_rows(grouped: Any) -> None:
    """One whose products overflow makes only its own rows infinite."""
    ranks = {0: 4, 1: 4}
    a, b = stacks(2, ranks)
    for first in a:
        first[1] = 1e300
    x = torch.full((4, INNER), 1e10, dtype=torch.float64)
    y = torch.zeros(4, sum(WIDTHS), dtype=torch.float64)
    grouped.add_lora(y, x, a, b, 1.0, grouped.plan(torch.tensor([0, 1, 0, 1]), ranks.__getitem__))
    assert torch.isfinite(y[[0, 2]]).all()
    assert not torch.isfinite(y[[1, 3]]).any()
