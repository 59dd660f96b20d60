"""First touches in catalogs of 1,000, 10,000 and 100,000 revisions: the latency must not follow the size.

One stack whose catalog grows between the measurements. The revisions share a few hundred rank-1 adapters,
more than the disk bound holds, and are touched so that an adapter comes again only after it has left the
disk: every first touch fetches from the store, which the part asserts. Beside it: a page of `GET /v1/models`,
and a resolution in the catalog. The catalog takes about a gigabyte, which goes at the end.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from loadtests.learning.stack import Stack
from loadtests.population import replica
from loadtests.population.client import LOCAL_KEY, Ask, Client, Load, median, percentile, words
from loadtests.population.publish import Shape, adapters, names, revisions
from loadtests.population.rig import Rows, rig

SIZES, QUICK_SIZES, TOUCHES = (1_000, 10_000, 100_000), (500, 2_000), 300
CAPACITY, DISTINCT, LIVE, PAGE, LOOKS = 32, 200, 8, 5, 100
SHAPE = Shape(rank=1, targets=("v_proj",))
DISK_BYTES = 8 * 2**20
"""About 80 adapters of this shape: more than the engine holds, fewer than there are."""


def measure(_: Stack | None, folder: Path, quick: bool) -> Rows:
    """On a stack of its own."""
    sizes, touches = (QUICK_SIZES, 20) if quick else (SIZES, TOUCHES)
    rows, references = Rows(), list[str]()
    untouched, policies = _Untouched(), names(sizes[-1], "swept")
    with rig(folder / "sweep", slots=4, max_resident=CAPACITY, disk_bytes=DISK_BYTES) as stack:
        blobs = adapters(stack, DISTINCT, SHAPE)
        for size in sizes:
            start = len(references)
            references += revisions(
                stack, policies[start:size], [blobs[_adapter(place)] for place in range(start, size)]
            )
            if start == 0:
                _make_live(stack, references)
            untouched.add(range(max(start, LIVE), size))
            ttfts = _first_touches(stack, [references[untouched.take()] for _ in range(touches)])
            rows.append({"revisions": size, **_figures(ttfts), **_lookups(stack, references)})
    shutil.rmtree(folder / "sweep")
    smallest = rows[0]["p50_ms"]
    return [row | {"ratio_to_smallest": row["p50_ms"] / smallest} for row in rows]


def _adapter(place: int) -> int:
    """The live revisions are adapters of their own: pinned, these never leave the disk."""
    return place if place < LIVE else LIVE + (place - LIVE) % (DISTINCT - LIVE)


class _Untouched:
    """Revisions by place that no request has named, grouped by the adapter that they are."""

    def __init__(self) -> None:
        self._places: list[list[int]] = [[] for _ in range(DISTINCT)]
        self._draw = random.Random(5)
        self._taken = 0

    def add(self, places: range) -> None:
        for place in places:
            self._places[_adapter(place)].append(place)

    def take(self) -> int:
        """Any one of the next adapter in turn."""
        group = self._places[_adapter(LIVE + self._taken)]
        self._taken += 1
        return group.pop(self._draw.randrange(len(group)))


def _make_live(running: Stack, references: list[str]) -> None:
    for reference in references[:LIVE]:
        running.point(reference)


def _first_touches(running: Stack, models: list[str]) -> list[float]:
    """Seconds to the first token, in order. Raises RuntimeError unless each was a load that fetched."""
    before = replica.counters(running)
    load = asyncio.run(_touch(running, models))
    window = replica.Window(before, replica.counters(running))
    if load.errors or not window.loads == window.fetches == len(models):
        raise RuntimeError(
            f"{len(models)} first touches: {window.loads} loads, {window.fetches} fetches, failed: {load.errors[:1]}"
        )
    return load.ttfts


def _figures(ttfts: list[float]) -> dict[str, Any]:
    third = len(ttfts) // 3
    parts = [ttfts[:third], ttfts[third : 2 * third], ttfts[2 * third :]]
    return {
        "first_touches": len(ttfts),
        **{f"p{share}_ms": percentile(ttfts, share / 100) * 1000 for share in (50, 95, 99)},
        "p50_by_third_ms": [median(part) * 1000 for part in parts],
    }


async def _touch(running: Stack, models: list[str]) -> Load:
    """One at a time, so that none waits for another's load."""
    async with Client(running.url) as client:
        return await client.closed([Ask(model, words(place, 8), 1) for place, model in enumerate(models)], 1)


def _lookups(running: Stack, references: list[str]) -> dict[str, float]:
    """Medians in milliseconds over references drawn from the whole catalog."""
    draw = random.Random(6)
    headers = {"Authorization": f"Bearer {LOCAL_KEY}"}
    with httpx.Client(headers=headers, timeout=60.0, trust_env=False) as http:
        first = http.get(f"{running.url}/v1/models", params={"limit": PAGE}).raise_for_status().json()
        behind = {"limit": LIVE - PAGE, "after": first["last_id"]}
        catalog = f"{running.url_of('catalog')}/internal/v1/resolve"
        return {
            "models_page_ms": _timed(http, lambda: (f"{running.url}/v1/models", {"limit": PAGE})),
            "models_next_page_ms": _timed(http, lambda: (f"{running.url}/v1/models", behind)),
            "resolve_ms": _timed(http, lambda: (catalog, {"reference": draw.choice(references)})),
        }


def _timed(http: httpx.Client, next_url: Callable[[], tuple[str, dict[str, Any]]]) -> float:
    taken = []
    for _ in range(LOOKS):
        url, params = next_url()
        began = time.perf_counter()
        http.get(url, params=params).raise_for_status()
        taken.append(time.perf_counter() - began)
    return median(taken) * 1000
