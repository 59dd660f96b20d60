"""Requests by Zipf's law over 1,000 adapters, for each exponent and each eviction policy of the replica.

In: one sequence of requests for each exponent, the same for each policy. Out: where their revisions were
found (GPU slot, engine's memory, disk, catalog), times to the first token, loads; and the exact shares of a
longer sequence through the replica's own eviction code without an engine (`tiers`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, get_args

from loadtests.learning.stack import Stack
from loadtests.population import replica
from loadtests.population.client import Ask, Client, Load, percentiles, words
from loadtests.population.publish import Shape, adapters, names, revisions
from loadtests.population.rig import Rows, rig, say
from loadtests.population.tiers import Sizes, simulate, zipf
from services.serving.eviction import EvictionName

EXPONENTS = (0.6, 0.9, 1.2)
ADAPTERS, SLOTS, CAPACITY = 1000, 4, 64
CALLERS, WORDS, TOKENS, SEED = 4, 10, 4, 17
REQUESTS, WARM_UP = 400, 100
SIMULATED, SIMULATED_WARM_UP = 100_000, 10_000
SHAPE = Shape(rank=1, targets=("q_proj", "v_proj"))
DISK_BYTES = 64 * 2**20
"""About a quarter of the adapters, so that the catalog's tier is asked too."""


def measure(_: Stack | None, folder: Path, quick: bool) -> Rows:
    """On a stack of its own."""
    count, warm_up, measured = (100, 20, 40) if quick else (ADAPTERS, WARM_UP, REQUESTS)
    sequences = {s: zipf(count, s, warm_up + measured, SEED) for s in EXPONENTS}
    rows = Rows()
    with rig(folder / "zipf", slots=SLOTS, max_resident=CAPACITY, disk_bytes=DISK_BYTES) as stack:
        manifests = adapters(stack, count, SHAPE)
        references = revisions(stack, names(count, "zipf"), manifests)
        sizes = Sizes(SLOTS, CAPACITY, DISK_BYTES // manifests[0].adapter_bytes)
        for policy in get_args(EvictionName):
            stack.restart(empty_disk=True, eviction=policy)
            for exponent, sequence in sequences.items():
                say(f"zipf {exponent} with {policy}: {len(sequence)} requests")
                figures = _cell(stack, [references[number] for number in sequence], warm_up)
                rows.append({"s": exponent, "eviction": policy, "on": "vLLM", **figures})
    return rows + _simulated(count, sizes, 5000 if quick else SIMULATED)


def _cell(running: Stack, models: list[str], warm_up: int) -> dict[str, Any]:
    """Figures of the requests behind the first `warm_up`. Raises RuntimeError unless all were answered."""
    before, load, after = asyncio.run(_ask(running, models, warm_up))
    if load.errors:
        raise RuntimeError(f"{len(load.errors)} of {len(models)} requests failed: {load.errors[0]}")
    window = replica.Window(before, after)
    measured = len(load.answers)
    return {
        "requests": measured,
        **{tier: count / measured for tier, count in window.requests_by_tier().items()},
        **percentiles(load.ttfts, "ttft_ms_"),
        "loads_per_1000": window.loads / measured * 1000,
        "requests_per_s": load.requests_per_s,
    }


async def _ask(running: Stack, models: list[str], warm_up: int) -> tuple[replica.Counters, Load, replica.Counters]:
    asks = [Ask(model, words(place, WORDS), TOKENS) for place, model in enumerate(models)]
    async with Client(running.url) as client:
        await client.closed(asks[:warm_up], CALLERS)
        before = await asyncio.to_thread(replica.counters, running)
        load = await client.closed(asks[warm_up:], CALLERS)
        return before, load, await asyncio.to_thread(replica.counters, running)


def _simulated(count: int, sizes: Sizes, requests: int) -> Rows:
    """Shares of the requests behind the first `SIMULATED_WARM_UP` or a tenth."""
    skip = min(SIMULATED_WARM_UP, requests // 10)
    rows = Rows()
    for exponent in EXPONENTS:
        sequence = zipf(count, exponent, requests, SEED)
        for policy in get_args(EvictionName):
            found = simulate(sequence, sizes, policy, skip)
            shares = {tier: found[tier] / (requests - skip) for tier in replica.TIERS}
            loads = 1000 * (shares["disk"] + shares["catalog"])
            rows.append({"s": exponent, "eviction": policy, "on": "paper", "requests": requests - skip, **shares,
                         "loads_per_1000": loads, "disk_holds": sizes.disk, "seed": SEED})  # fmt: skip
    return rows
