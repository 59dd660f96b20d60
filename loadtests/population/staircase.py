"""Cold loads that arrive together: 16 adapters at once, and 50 requests for one.

Of the 16, the sorted times to the first token make a staircase whose step is the cost of a load. The 50
share one load; the part fails if they do not.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadtests.learning.stack import Stack
from loadtests.population import replica
from loadtests.population.client import Ask, Client, Load, median, percentile, words
from loadtests.population.publish import Shape, names, publish
from loadtests.population.rig import Rows, rig
from shared.bases import DENSE_TARGETS

AT_ONCE, SHARERS, ROUNDS = 16, 50, 3
TOKENS = 4
SHAPE = Shape(rank=8, targets=DENSE_TARGETS)
SLOTS, CAPACITY = 4, 64


def measure(_: Stack | None, folder: Path, quick: bool) -> Rows:
    """On a stack of its own."""
    rounds = 1 if quick else ROUNDS
    with rig(folder / "staircase", slots=SLOTS, max_resident=CAPACITY) as stack:
        references = publish(stack, names(rounds * (AT_ONCE + 2) + 1, "stair"), shape=SHAPE)
        _together(stack, references[:1])
        rows = Rows()
        for number in range(rounds):
            alone, shared, *distinct = references[1 + number * (AT_ONCE + 2) :][: AT_ONCE + 2]
            rows.append(_row(number, "one cold adapter alone", *_together(stack, [alone])))
            rows.append(_staircase(number, *_together(stack, distinct)))
            rows.append(_shared(number, *_together(stack, [shared] * SHARERS)))
    return rows


def _together(running: Stack, models: list[str]) -> tuple[Load, replica.Window]:
    """One request for each, all at once. Raises RuntimeError unless each is answered."""

    async def ask() -> Load:
        async with Client(running.url) as client:
            return await client.closed(
                [Ask(model, words(place, 15), TOKENS) for place, model in enumerate(models)], len(models)
            )

    before = replica.counters(running)
    load = asyncio.run(ask())
    if load.errors:
        raise RuntimeError(f"{len(load.errors)} of {len(models)} requests failed: {load.errors[0]}")
    return load, replica.Window(before, replica.counters(running))


def _row(number: int, what: str, load: Load, window: replica.Window) -> dict[str, Any]:
    ranked = sorted(load.ttfts)
    return {
        "round": number,
        "what": what,
        "requests": len(ranked),
        "loads": window.loads,
        "first_ms": ranked[0] * 1000,
        "p50_ms": percentile(ranked, 0.5) * 1000,
        "last_ms": ranked[-1] * 1000,
    }


def _staircase(number: int, load: Load, window: replica.Window) -> dict[str, Any]:
    """`step_ms`: median distance of neighbours among the sorted times."""
    if window.loads != AT_ONCE:
        raise RuntimeError(f"{AT_ONCE} cold adapters made {window.loads} loads")
    ranked = sorted(load.ttfts)
    steps = [later - earlier for earlier, later in pairwise(ranked)]
    return {
        **_row(number, f"{AT_ONCE} cold adapters at once", load, window),
        "step_ms": median(steps) * 1000,
        "mean_step_ms": (ranked[-1] - ranked[0]) / (len(ranked) - 1) * 1000,
        "ttft_ms": [time * 1000 for time in ranked],
    }


def _shared(number: int, load: Load, window: replica.Window) -> dict[str, Any]:
    if window.loads != 1:
        raise RuntimeError(f"{SHARERS} requests for one cold adapter made {window.loads} loads")
    ranked = sorted(load.ttfts)
    return {
        **_row(number, f"{SHARERS} requests, one cold adapter", load, window),
        "spread_ms": (ranked[-1] - ranked[0]) * 1000,
    }
