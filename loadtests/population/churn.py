"""New revisions under load: whoever asks for the alias gets what it points at, at that very time.

In a stretch with churn, every `EVERY` answers the alias `live` of one policy moves to its next revision, by
the gateway's own call, which returns once that revision is proved and serves. An answer is right if the
revision that it names (and the adapter's sha256 with it) was the alias's at some moment between its request
and its first token. When a revision was the alias's is bounded from outside: from the catalog's own record
of the move, taken before it is visible, to the return of the call that moved the alias on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import Any

from cli.gateway import policy_path
from loadtests.population.client import Answer, Ask, Client, Load, median, percentile, words
from loadtests.population.publish import Shape, adapters, names
from loadtests.population.publish import revisions as publish_as
from loadtests.population.rig import Rig, Run, rig, say
from shared.bases import DENSE_TARGETS

SLOTS, RESIDENT = 4, 16
CALLERS, TOKENS, EVERY = 4, 16, 10
DIGEST = "mint-adapter-sha256"
SHAPE = Shape(rank=8, targets=DENSE_TARGETS)
_seeds = count(1)


@dataclass(frozen=True)
class Reign:
    """A revision's time as the alias's target, in seconds of time.perf_counter, at its widest."""

    adapter_sha256: str
    since: float
    until: float


def measure(run: Run) -> None:
    rounds, moves = run.pick(3, 1), run.pick(10, 3)
    with rig(run.folder / "churn", slots=SLOTS, max_resident=RESIDENT) as ours:
        made = adapters(ours, rounds * moves + 1, SHAPE)
        (policy,) = names(1, "churned")
        revisions = publish_as(ours, [policy] * len(made), made)
        digests = {name: manifest.adapter_sha256 for name, manifest in zip(revisions, made, strict=True)}
        ours.point(revisions[0])
        asyncio.run(_quiet(ours.url, policy, CALLERS))
        say(f"churn: {policy} serves, {len(made) - 1} more revisions are published")
        quiet, churned, returned = list[Load](), list[Load](), dict[str, float]()
        for start in range(1, len(made), moves):
            quiet.append(asyncio.run(_quiet(ours.url, policy, (moves + 1) * EVERY)))
            churned.append(asyncio.run(_churn(ours, policy, revisions[start : start + moves], returned)))
            reigns = _reigns(ours.get(f"{policy_path(policy)}/moves"), returned, digests)
            row = _row(quiet, churned) | _verdict([*quiet, *churned], reigns)
            say(f"  round {len(churned)} of {rounds}: {row['wrong_revisions']} wrong of {row['answers']}")
            run.keep("churn", [row], {"no churn": _ttfts(quiet), "churn": _ttfts(churned)})


def _ask(policy: str) -> Ask:
    return Ask(policy, words(next(_seeds)), TOKENS)


async def _quiet(url: str, policy: str, number: int) -> Load:
    async with Client(url) as client:
        return await client.closed([_ask(policy) for _ in range(number)], CALLERS)


async def _churn(ours: Rig, policy: str, revisions: Sequence[str], returned: dict[str, float]) -> Load:
    """Load until the alias has moved through `revisions`, a move every `EVERY` requests, and as many requests
    after the last. `returned`: when the call that moved it to each returned."""
    over, sent, more = asyncio.Event(), 0, asyncio.Event()

    def ask(number: int) -> Ask:
        nonlocal sent
        sent = number + 1
        more.set()
        return _ask(policy)

    async def until(number: int) -> None:
        while sent < number:
            more.clear()
            await more.wait()

    async with Client(ours.url) as client:
        load = asyncio.create_task(client.steadily(ask, CALLERS, over))
        try:
            for revision in revisions:
                await until(sent + EVERY)
                await asyncio.to_thread(ours.point, revision)
                returned[revision] = time.perf_counter()
                say(f"  {revision} is live after {sent} requests")
            await until(sent + EVERY)
        finally:
            over.set()
            found = await load
    return found


def _reigns(
    moves: Sequence[Mapping[str, Any]], returned: Mapping[str, float], digests: Mapping[str, str]
) -> dict[str, Reign]:
    """By revision, from the alias's audit trail in order of its versions."""
    behind = time.time() - time.perf_counter()
    trail = sorted(moves, key=lambda move: int(move["version"]))
    since = [datetime.fromisoformat(move["at"]).timestamp() - behind for move in trail]
    revisions = [str(move["revision"]) for move in trail]
    until = [*(returned[revision] for revision in revisions[1:]), math.inf]
    return {
        revision: Reign(digests[revision], begins, ends)
        for revision, begins, ends in zip(revisions, since, until, strict=True)
    }


def _verdict(loads: Sequence[Load], reigns: Mapping[str, Reign]) -> dict[str, Any]:
    answers = [answer for load in loads for answer in load.good]
    wrong = [answer for answer in answers if not _right(answer, reigns)]
    for text in sorted({text for load in loads for text in load.errors})[:3]:
        say(f"  error {text}")
    for answer in wrong[:5]:
        say(f"  wrong: {answer.revision} ({answer.headers.get(DIGEST)}), asked at {answer.began:.3f}")
    return {
        "answers": len(answers),
        "moves": len(reigns) - 1,
        "revisions_seen": len({answer.revision for answer in answers}),
        "wrong_revisions": len(wrong),
        "errors": sum(len(load.errors) for load in loads),
    }


def _right(answer: Answer, reigns: Mapping[str, Reign]) -> bool:
    reign = reigns.get(answer.revision or "")
    if reign is None or answer.first is None or answer.headers.get(DIGEST) != reign.adapter_sha256:
        return False
    return reign.since <= answer.first and answer.began <= reign.until


def _row(quiet: Sequence[Load], churned: Sequence[Load]) -> dict[str, Any]:
    """Each ratio: a stretch with churn to the quiet one before it, the median and range over the rounds."""
    p50 = [_ttft(b, 0.5) / _ttft(a, 0.5) for a, b in zip(quiet, churned, strict=True)]
    p95 = [_ttft(b, 0.95) / _ttft(a, 0.95) for a, b in zip(quiet, churned, strict=True)]
    speed = [b.tokens_per_s / a.tokens_per_s for a, b in zip(quiet, churned, strict=True)]
    return {
        "rounds": len(churned),
        "quiet_ttft_p50_ms": median([_ttft(load, 0.5) for load in quiet]) * 1000.0,
        "churn_ttft_p50_ms": median([_ttft(load, 0.5) for load in churned]) * 1000.0,
        "p50_ratio": median(p50),
        "p50_ratio_range": [min(p50), max(p50)],
        "p95_ratio": median(p95),
        "p95_ratio_range": [min(p95), max(p95)],
        "tok_s_ratio": median(speed),
        "tok_s_ratio_range": [min(speed), max(speed)],
    }


def _ttft(load: Load, share: float) -> float:
    return percentile(load.ttfts, share)


def _ttfts(loads: Sequence[Load]) -> list[float]:
    return [t for load in loads for t in load.ttfts]
