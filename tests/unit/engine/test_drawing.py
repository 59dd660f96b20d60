"""Drawing one token: filters, logprobs, and the seeds of sequences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shared.engine.drawing import draw, log_softmax
from shared.engine.port import SamplingSettings
from shared.engine.requests import sequence_seeds

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _support(**settings: float) -> dict[int, float]:
    drawn = draw(LOGITS, SamplingSettings(max_tokens=1, logprobs=4, **settings), [], _rng())  # type: ignore[arg-type]
    assert drawn.top is not None
    return {token: math.exp(value) for token, value in drawn.top.items()}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}),
        ({"top_k": 2}, {0: 4 / 7, 1: 3 / 7}),
        ({"top_p": 0.5}, {0: 4 / 7, 1: 3 / 7}),
        ({"top_p": 0.01}, {0: 1.0}),
        ({"min_p": 0.6}, {0: 4 / 7, 1: 3 / 7}),
        ({"temperature": 0.5}, {0: 16 / 30, 1: 9 / 30, 2: 4 / 30, 3: 1 / 30}),
        ({"temperature": 0.0}, {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}),
    ],
)
def test_what_is_left_sums_to_one(settings: dict[str, float], expected: dict[int, float]) -> None:
    found = _support(**settings)
    assert found.keys() == expected.keys()
    assert all(found[token] == pytest.approx(value, rel=1e-5) for token, value in expected.items())


def test_draws_follow_the_distribution() -> None:
    rng = _rng()
    settings = SamplingSettings(max_tokens=1)
    drawn = [draw(LOGITS, settings, [], rng).token for _ in range(20_000)]
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    assert np.abs(shares - np.exp(LOGITS)).max() < 0.015


def test_log_softmax_holds_large_logits() -> None:
    row = log_softmax(np.array([1e4, 1e4, -1e4], np.float32))
    assert row[:2] == pytest.approx([math.log(0.5)] * 2, abs=1e-5)


def test_seeds_of_near_requests_never_meet() -> None:
    seeds = [seed for request in range(50) for seed in sequence_seeds(request, 16)]
    assert len(set(seeds)) == len(seeds)
    assert sequence_seeds(7, 4)[:2] == sequence_seeds(7, 2)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sequence_seeds(None, 2) != sequence_seeds(None, 2)
