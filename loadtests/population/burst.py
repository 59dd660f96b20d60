"""What warm tenants feel of a burst of cold ones, with the admission of loads off, on, and in two phases.

Four warm policies stream all the time. A measurement is a quiet stretch, then a burst: one request for each
of 32 adapters that this replica has neither in memory nor on disk. Each ratio is of the burst to the quiet
stretch just before it, on the same engine, so that drift cancels out. "off": whatever is asked for is
fetched and activated at once; "on": one load at a time, from the fetch to the engine; "two-phase": fetches
side by side, activations one by one with pauses for the running streams (the defaults). "no loads": as many
requests for the warm policies themselves, spread over the time that a two-phase burst took: what remains of
a burst without any load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

from loadtests.population.client import Ask, Client, Load, median, percentile, words
from loadtests.population.publish import Shape, names, publish
from loadtests.population.rig import Rig, Rows, Run, rig, say
from shared.bases import DENSE_TARGETS

WARM, COLD = 4, 32
CALLERS = 2 * WARM
WARM_TOKENS, COLD_TOKENS = 16, 4
SLOTS, RESIDENT = 8, 16
SHAPE = Shape(rank=8, targets=DENSE_TARGETS)
MODES: dict[str, dict[str, Any]] = {
    "off": {"fetches": COLD, "activations": COLD, "activation_share": 1},
    "on": {"fetches": 1, "activations": 1, "activation_share": 1},
    "two-phase": {"fetches": 4, "activations": 1, "activation_share": 0.5},
}
_seeds = count(1)


def measure(run: Run) -> None:
    rounds = run.pick(3, 1)
    rows: Rows = []
    samples: dict[str, list[float]] = {}
    with rig(run.folder / "burst", slots=SLOTS, max_resident=RESIDENT, **MODES["off"]) as ours:
        warm = publish(ours, names(WARM, "warm"), shape=SHAPE)
        for revision in warm:
            ours.point(revision)
        policies = [revision.split("@")[0] for revision in warm]
        cold = publish(ours, names(COLD * rounds, "cold"), shape=SHAPE, seed=1000)
        bursts = [cold[start : start + COLD] for start in range(0, len(cold), COLD)]
        for mode, settings in MODES.items():
            ours.restart(empty_disk=True, **settings)
            _measure(run, ours, mode, policies, bursts, rows, samples)
        again = [policies * (COLD // WARM)] * rounds
        _measure(run, ours, "no loads", policies, again, rows, samples, rate=COLD / rows[-1]["burst_s"])


def _measure(
    run: Run,
    ours: Rig,
    mode: str,
    policies: Sequence[str],
    bursts: Sequence[Sequence[str]],
    rows: Rows,
    samples: dict[str, list[float]],
    rate: float | None = None,
) -> None:
    """Adds the mode to `rows` and `samples`, and keeps both. `rate`: of the burst, requests a second; None: at once."""
    say(f"burst, {mode}")
    found = [_round(ours, policies, burst, run.pick(10, 5), rate) for burst in bursts]
    rows.append({"admission": mode, **_row(found)})
    samples |= _series(mode, found)
    run.keep("burst", rows, samples)


def _round(
    ours: Rig, policies: Sequence[str], cold: Sequence[str], quiet_s: float, rate: float | None
) -> tuple[Load, Load, Load]:
    """The warm load while it is quiet, the warm load while the burst lasts, and the burst itself."""
    found = asyncio.run(_stream(ours.url, policies, cold, quiet_s, rate))
    for load in found:
        for text in sorted(set(load.errors))[:3]:
            say(f"  error {text}")
    say(f"  the burst took {found[2].seconds:.1f} s, {len(found[2].errors)} of {len(cold)} refused")
    return found


async def _stream(
    url: str, policies: Sequence[str], cold: Sequence[str], quiet_s: float, rate: float | None
) -> tuple[Load, Load, Load]:
    over = asyncio.Event()

    def ask(_: int) -> Ask:
        number = next(_seeds)
        return Ask(policies[number % len(policies)], words(number), WARM_TOKENS)

    async with Client(url) as client:
        await client.closed([ask(0) for _ in range(CALLERS)], CALLERS)
        steady = asyncio.create_task(client.steadily(ask, CALLERS, over))
        began = time.perf_counter()
        await asyncio.sleep(quiet_s)
        burst_at = time.perf_counter()
        asks = [Ask(name, words(next(_seeds)), COLD_TOKENS) for name in cold]
        burst = await (client.closed(asks, len(asks)) if rate is None else client.open(asks, rate))
        ended = time.perf_counter()
        over.set()
        answers = (await steady).answers
    quiet = [answer for answer in answers if answer.began + answer.seconds <= burst_at]
    during = [answer for answer in answers if burst_at <= answer.began <= ended]
    return Load(quiet, burst_at - began), Load(during, ended - burst_at), burst


def _row(found: Sequence[tuple[Load, Load, Load]]) -> dict[str, Any]:
    """Medians over the rounds; each `ratio` with the lowest and highest of its rounds."""
    quiet, during, bursts = zip(*found, strict=True)
    cold = [t for burst in bursts for t in burst.ttfts]
    return {
        "rounds": len(found),
        "quiet_ttft_p95_ms": _p95_ms([load.ttfts for load in quiet]),
        "burst_ttft_p95_ms": _p95_ms([load.ttfts for load in during]),
        **_ratio("ttft_ratio", [load.ttfts for load in during], [load.ttfts for load in quiet]),
        "quiet_gap_p95_ms": _p95_ms([load.gaps for load in quiet]),
        "burst_gap_p95_ms": _p95_ms([load.gaps for load in during]),
        **_ratio("gap_ratio", [load.gaps for load in during], [load.gaps for load in quiet]),
        "longest_gap_ms": max((gap for load in during for gap in load.gaps), default=0.0) * 1000.0,
        "burst_s": median([burst.seconds for burst in bursts]),
        "cold_ttft_p50_ms": percentile(cold, 0.5) * 1000.0 if cold else None,
        "cold_ttft_max_ms": max(cold) * 1000.0 if cold else None,
        "cold_refused": sum(len(burst.errors) for burst in bursts),
        "warm_errors": sum(len(load.errors) for load in (*quiet, *during)),
        "warm_requests": sum(len(load.answers) for load in during),
    }


def _p95_ms(rounds: Sequence[Sequence[float]]) -> float | None:
    """Of the rounds that have any."""
    found = [percentile(values, 0.95) for values in rounds if values]
    return median(found) * 1000.0 if found else None


def _ratio(name: str, during: Sequence[Sequence[float]], quiet: Sequence[Sequence[float]]) -> dict[str, Any]:
    pairs = [(a, b) for a, b in zip(during, quiet, strict=True) if a and b]
    if not pairs:
        return {name: None, f"{name}_range": None}
    ratios = [percentile(a, 0.95) / percentile(b, 0.95) for a, b in pairs]
    return {name: median(ratios), f"{name}_range": [min(ratios), max(ratios)]}


def _series(mode: str, found: Sequence[tuple[Load, Load, Load]]) -> dict[str, list[float]]:
    """The warm policies' times to the first token."""
    return {
        f"quiet ({mode})": [t for quiet, _, _ in found for t in quiet.ttfts],
        f"burst ({mode})": [t for _, during, _ in found for t in during.ttfts],
    }
