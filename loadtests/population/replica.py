"""What a stack's one serving replica says and shows of itself: counters, tiers, memory, disk.

Everything is read from outside: its /metrics, its residency report, its processes, its directory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from loadtests.learning.stack import Stack
from shared.sampling.wire import RESIDENCY_PATH

TIERS = ("slot", "memory", "disk", "catalog")
_ADAPTERS = "serving/*/adapters"


@dataclass(frozen=True)
class Counters:
    """Samples of one moment, by name and labels."""

    samples: tuple[tuple[str, dict[str, str], float], ...]

    def sum(self, name: str, **labels: str) -> float:
        """Over the samples that have all of `labels`."""
        return sum(value for found, held, value in self.samples if found == name and labels.items() <= held.items())


@dataclass(frozen=True)
class Window:
    """What was counted between two moments."""

    before: Counters
    after: Counters

    def sum(self, name: str, **labels: str) -> float:
        return self.after.sum(name, **labels) - self.before.sum(name, **labels)

    @property
    def loads(self) -> int:
        """Cold loads that ended well."""
        return round(self.sum("mint_revision_activate_seconds_count", outcome="ready"))

    @property
    def fetches(self) -> int:
        """Loads whose files came from the store."""
        return round(self.sum("mint_revision_fetch_seconds_count", outcome="catalog"))

    def requests_by_tier(self) -> dict[str, int]:
        """Where the revision of each request was found; in a slot by the engine's list of some 2 s ago."""
        return {tier: round(self.sum("mint_revision_holds_total", tier=tier)) for tier in TIERS}


def counters(running: Stack) -> Counters:
    answer = httpx.get(f"{running.url_of('serving')}/metrics", timeout=30.0, trust_env=False).raise_for_status()
    families = text_string_to_metric_families(answer.text)
    return Counters(tuple((s.name, dict(s.labels), s.value) for family in families for s in family.samples))


def residency(running: Stack) -> dict[str, Any]:
    answer = httpx.get(f"{running.url_of('serving')}{RESIDENCY_PATH}", timeout=30.0, trust_env=False)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def memory_bytes(running: Stack) -> int:
    """Resident memory of the serving process and of everything that it started, the engine above all."""
    process = running.process("serving")
    return sum(_resident(each) for each in (process, *process.children(recursive=True)))


def disk_bytes(running: Stack) -> int:
    """Of the adapter files near the engine."""
    return sum(_sizes(path for root in running.folder.glob(_ADAPTERS) for path in root.rglob("*")))


def _sizes(paths: Iterable[Path]) -> Iterable[int]:
    for path in paths:
        try:
            if path.is_file():
                yield path.stat().st_size
        except FileNotFoundError:
            continue


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
