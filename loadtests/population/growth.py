"""Residency growth: ever more adapters through one engine, whose memory must stay flat at the bound.

In: revisions of one small shape, each loaded once by a request for it. Out: every 100 loads the memory of
the serving process with its engine, what is resident, and the bytes on disk; the slope of the memory over
the second half; `growth.png`.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loadtests.learning.stack import Stack
from loadtests.population import replica
from loadtests.population.client import Ask, Client, Load, words
from loadtests.population.publish import Shape, adapters, names, revisions
from loadtests.population.rig import Rows, rig

FIRST, LAST, EVERY = 200, 2000, 100
CAPACITY, DISTINCT, CALLERS = 64, 300, 4
SHAPE = Shape(rank=1, targets=("v_proj",))
DISK_BYTES = 12 * 2**20
"""About 120 adapters of this shape: more than the engine holds, fewer than there are."""
MIB = 2**20


def measure(_: Stack | None, folder: Path, quick: bool) -> Rows:
    """On a stack of its own."""
    first, last, every = (80, 160, 20) if quick else (FIRST, LAST, EVERY)
    with rig(folder / "growth", slots=4, max_resident=CAPACITY, disk_bytes=DISK_BYTES) as stack:
        blobs = adapters(stack, min(DISTINCT, last), SHAPE)
        references = revisions(stack, names(last, "grown"), [blobs[place % len(blobs)] for place in range(last)])
        ends = [first, *range(first + every, last + 1, every)]
        rows = [_load(stack, references, start, end) for start, end in pairwise([0, *ends])]
    _draw(rows, folder / "growth.png")
    return [*rows, _verdict(rows)]


def _load(running: Stack, references: list[str], start: int, end: int) -> dict[str, Any]:
    """Ask once for each of `references[start:end]`. Raises RuntimeError unless each was answered, each by
    a load of its own."""

    async def ask() -> Load:
        async with Client(running.url) as client:
            return await client.closed([Ask(model, words(1, 8), 1) for model in references[start:end]], CALLERS)

    before = replica.counters(running)
    load = asyncio.run(ask())
    loads = replica.Window(before, replica.counters(running)).loads
    if load.errors or loads != end - start:
        raise RuntimeError(f"{loads} loads for {end - start} revisions; failed: {load.errors[:1]}")
    report = replica.residency(running)
    return {
        "loads": end,
        "memory_MiB": replica.memory_bytes(running) / MIB,
        "in_memory": len(report["memory"]),
        "in_slots": len(report["slot"]),
        "on_disk": report["disk_count"],
        "disk_MiB": replica.disk_bytes(running) / MIB,
        "ms_per_load": load.seconds / (end - start) * 1000,
    }


def _verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The slope of a straight line through the second half of the measurements."""
    half = rows[len(rows) // 2 :]
    loads, memory = [row["loads"] for row in half], [row["memory_MiB"] for row in half]
    slope = float(np.polyfit(loads, memory, 1)[0])
    return {
        "loads": f"{half[0]['loads']} to {half[-1]['loads']}",
        "slope_KiB_per_load": slope * 1024,
        "growth_share": slope * (loads[-1] - loads[0]) / memory[0],
        "disk_bound_MiB": DISK_BYTES / MIB,
    }


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    memory, tiers = figure.subplots(1, 2)
    loads = [row["loads"] for row in rows]
    memory.plot(loads, [row["memory_MiB"] for row in rows], marker="o", color="black")
    memory.set_title("serving process and engine: resident MiB")
    memory.set_ylim(0, 1.2 * max(row["memory_MiB"] for row in rows))
    for key, label in (("in_memory", "in the engine's memory"), ("on_disk", "on disk"), ("in_slots", "in slots")):
        tiers.plot(loads, [row[key] for row in rows], marker="o", label=label)
    tiers.set_title("adapters by tier")
    tiers.legend(loc="center right")
    for axes in (memory, tiers):
        axes.set_xlabel("adapters loaded so far")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
