"""What the gateway and the stack behind it cost: the same requests to ours and to bare vLLM, in turns.

All serve the same 8 adapters of rank 8 under the same names and with the same engine settings; whoever
waits is stopped. Our engine replaces vLLM's LoRA operators on CPU, which makes it differ from
`vllm` as it comes; against `vllm, our operators`, whose engine computes exactly what ours does, what is left
is the cost of our gateway and of the services behind it. The fake engine shows that cost alone, in CPU time
per part.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from loadtests.population.client import LOCAL_KEY, Ask, Client, Load, median, percentile, percentiles, spread, words
from loadtests.population.peer import Peer, bare_vllm
from loadtests.population.publish import Shape, names, publish
from loadtests.population.rig import BASE, Rig, Rows, Run, cpu_seconds, rig, say
from shared.bases import DENSE_TARGETS

ADAPTERS = 8
CALLERS = 16
RESIDENT = 16
SHAPE = Shape(rank=8, targets=DENSE_TARGETS)
PARTS = ("gateway", "serving", "catalog", "nats")
OURS, BARE, EQUAL = "mint", "vllm", "vllm, our operators"
WITH_ADAPTERS, BASE_ALONE = "8 adapters", "base alone"
TTFT_TOKENS = 4
BLOCK = 10_000
_blocks = count(1)

Loads = Mapping[str, Sequence[Load]]


@dataclass
class Prompts:
    """Requests over the models in turn, with prompts of about 60 tokens; none comes twice."""

    models: Sequence[str]
    seed: int

    def take(self, number: int, max_tokens: int = 32) -> list[Ask]:
        first, self.seed = self.seed, self.seed + number
        return [Ask(self.models[seed % len(self.models)], words(seed), max_tokens) for seed in range(first, self.seed)]


@dataclass(frozen=True)
class Sides:
    """`traffic`: the models asked for and the servers that are asked, by the name of the traffic."""

    ours: Rig
    peers: Mapping[str, Peer]
    traffic: Mapping[str, tuple[list[str], tuple[str, ...]]]

    @contextmanager
    def turn(self, side: str) -> Iterator[str]:
        """The side's URL. Those whose turn it is not are stopped, since an idle stack takes time too."""
        with ExitStack() as stack:
            for name, peer in self.peers.items():
                if name != side:
                    stack.enter_context(peer.paused())
            if side == OURS:
                self.ours.answering()
            else:
                stack.enter_context(self.ours.paused())
            yield self.ours.url if side == OURS else self.peers[side].url

    def each(self, traffic: str, rounds: int, measure: Callable[[str, Prompts], Load]) -> Loads:
        """`measure(url, prompts)` of every server in each round, with the same prompts; who goes first moves on
        from round to round."""
        models, servers = self.traffic[traffic]
        found: dict[str, list[Load]] = {side: [] for side in servers}
        for number in range(rounds):
            first = next(_blocks) * BLOCK
            for place in range(len(servers)):
                side = servers[(place + number) % len(servers)]
                with self.turn(side) as url:
                    found[side].append(measure(url, Prompts(models, first)))
            say(f"  round {number + 1} of {rounds}")
        return found


def measure(run: Run) -> None:
    with rig(run.folder / "overhead", slots=ADAPTERS, max_resident=RESIDENT) as ours:
        policies = publish_live(ours)
        adapters = {policy: _download(ours, policy, run.folder / "overhead-adapters") for policy in policies}
        settings = ours.engine_settings()
        traffic = {WITH_ADAPTERS: (policies, (BARE, OURS, EQUAL)), BASE_ALONE: ([BASE], (OURS, EQUAL))}
        with (
            bare_vllm(adapters, settings, run.folder / "vllm.log") as bare,
            bare_vllm(adapters, settings, run.folder / "vllm-our-operators.log", our_operators=True) as equal,
        ):
            sides = Sides(ours, {BARE: bare, EQUAL: equal}, traffic)
            _idle(run, sides)
            rate = _saturation(run, sides)
            _one_caller(run, sides)
            _half(run, sides, rate / 2)
        ours.restart(engine="fake")
        _fake(run, ours, {WITH_ADAPTERS: policies, BASE_ALONE: [BASE]})


def publish_live(ours: Rig) -> list[str]:
    """8 policies whose `live` alias is ready on the replica."""
    revisions = publish(ours, names(ADAPTERS, "o"), shape=SHAPE)
    for revision in revisions:
        ours.point(revision)
    return [revision.split("@")[0] for revision in revisions]


def _download(ours: Rig, policy: str, folder: Path) -> Path:
    """The adapter's files as the gateway gives them to anybody."""
    directory = folder / policy.replace("/", "-")
    directory.mkdir(parents=True, exist_ok=True)
    url = f"{ours.url}/mint/v1/revisions/{policy}/1/archive"
    answer = httpx.get(url, headers={"Authorization": f"Bearer {LOCAL_KEY}"}, timeout=60.0, trust_env=False)
    answer.raise_for_status()
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        archive.extractall(directory, filter="data")
    return directory.resolve()


async def _closed(url: str, wanted: Sequence[Ask], concurrency: int) -> Load:
    async with Client(url) as client:
        return await client.closed(wanted, concurrency)


async def _open(url: str, wanted: Sequence[Ask], rate: float) -> Load:
    async with Client(url) as client:
        return await client.open(wanted, rate)


def closed(url: str, prompts: Prompts, number: int, callers: int, max_tokens: int = 32) -> Load:
    """After a few requests to warm up, on connections of their own."""
    asyncio.run(_closed(url, prompts.take(callers, 2), callers))
    return asyncio.run(_closed(url, prompts.take(number, max_tokens), callers))


def _idle(run: Run, sides: Sides) -> None:
    """What each server takes while it only waits."""
    watched = {OURS: [each for found in sides.ours.processes().values() for each in found]}
    watched |= {name: peer.processes() for name, peer in sides.peers.items()}
    before, began = {side: cpu_seconds(found) for side, found in watched.items()}, time.perf_counter()
    time.sleep(run.pick(30, 2))
    seconds = time.perf_counter() - began
    cores = {side: (cpu_seconds(found) - before[side]) / seconds for side, found in watched.items()}
    run.keep("overhead.idle", [{"server": side, "cores_while_idle": used} for side, used in cores.items()], None)


def _saturation(run: Run, sides: Sides) -> float:
    """Returns bare vLLM's requests per second with the adapters."""
    rows: Rows = []
    rate = 0.0
    for traffic in sides.traffic:
        say(f"saturation, {traffic}")
        loads = sides.each(
            traffic, run.pick(3, 1), lambda url, prompts: closed(url, prompts, run.pick(64, 16), CALLERS)
        )
        rows += [_throughput(traffic, side, loads) for side in loads]
        rate = rate or median([load.requests_per_s for load in loads[BARE]])
        run.keep("overhead.saturation", rows, None)
    return rate


def _throughput(traffic: str, side: str, loads: Loads) -> dict[str, Any]:
    """`mint_ratio`: our tokens per second to this server's, by round; its median and range."""
    speeds = [load.tokens_per_s for load in loads[side]]
    ratios = [ours.tokens_per_s / load.tokens_per_s for ours, load in zip(loads[OURS], loads[side], strict=True)]
    return {
        "traffic": traffic,
        "server": side,
        "tok_s": median(speeds),
        "tok_s_spread": spread(speeds),
        "requests_s": median([load.requests_per_s for load in loads[side]]),
        "mint_ratio": None if side == OURS else median(ratios),
        "mint_ratio_range": None if side == OURS else [min(ratios), max(ratios)],
        "rounds": len(speeds),
        "errors": _errors(loads[side]),
    }


def _one_caller(run: Run, sides: Sides) -> None:
    rows: Rows = []
    samples: dict[str, list[float]] = {}
    for traffic in sides.traffic:
        say(f"one caller, {traffic}")
        loads = sides.each(
            traffic, run.pick(4, 2), lambda url, prompts: closed(url, prompts, run.pick(50, 6), 1, TTFT_TOKENS)
        )
        rows += [_latency(traffic, side, loads) for side in loads]
        samples |= {f"{side}, {traffic}": _ttfts(loads[side]) for side in loads}
        run.keep("overhead.one_caller", rows, samples)


def _half(run: Run, sides: Sides, rate: float) -> None:
    say(f"half of the peer's saturation: {rate:.2f} requests a second")
    number = run.pick(24, 8)
    loads = sides.each(WITH_ADAPTERS, 1, lambda url, prompts: asyncio.run(_open(url, prompts.take(number), rate)))
    rows = [{"rate": rate, **_latency(WITH_ADAPTERS, side, loads)} for side in loads]
    run.keep("overhead.half_rate", rows, {side: _ttfts(loads[side]) for side in loads})


def _latency(traffic: str, side: str, loads: Loads) -> dict[str, Any]:
    """`mint_more_ms`: our median time to the first token above this server's, over all requests; its range is
    over the rounds."""
    more = [_p50_ms([ours]) - _p50_ms([load]) for ours, load in zip(loads[OURS], loads[side], strict=True)]
    return {
        "traffic": traffic,
        "server": side,
        "requests": len(_ttfts(loads[side])),
        **percentiles(_ttfts(loads[side]), "ttft_ms_"),
        "mint_more_ms": None if side == OURS else _p50_ms(loads[OURS]) - _p50_ms(loads[side]),
        "mint_more_range": None if side == OURS else [min(more), max(more)],
        "errors": _errors(loads[side]),
    }


def _ttfts(loads: Sequence[Load]) -> list[float]:
    return [ttft for load in loads for ttft in load.ttfts]


def _p50_ms(loads: Sequence[Load]) -> float:
    return percentile(_ttfts(loads), 0.5) * 1000.0


def _errors(loads: Sequence[Load]) -> int:
    found = [text for load in loads for text in load.errors]
    for text in sorted(set(found))[:3]:
        say(f"  error {text}")
    return len(found)


def _fake(run: Run, ours: Rig, traffic: Mapping[str, list[str]]) -> None:
    """Throughput, TTFT, and CPU milliseconds of each part per request of 32 tokens; those of `serving` hold the
    fake engine's own arithmetic."""
    rows: Rows = []
    for name, models in traffic.items():
        say(f"fake engine, {name}")
        prompts = Prompts(models, next(_blocks) * BLOCK)
        alone = closed(ours.url, prompts, run.pick(100, 10), 1, TTFT_TOKENS)
        asyncio.run(_closed(ours.url, prompts.take(CALLERS, 2), CALLERS))
        parts = ours.processes()
        before = {part: cpu_seconds(parts[part]) for part in PARTS}
        load = asyncio.run(_closed(ours.url, prompts.take(run.pick(160, 32)), CALLERS))
        used = {part: (cpu_seconds(parts[part]) - before[part]) / len(load.answers) * 1000.0 for part in PARTS}
        rows.append(
            {
                "traffic": name,
                "requests_s": load.requests_per_s,
                "tok_s": load.tokens_per_s,
                **percentiles(alone.ttfts, "one_caller_ttft_"),
                **{f"{part}_cpu_ms": value for part, value in used.items()},
                "errors": _errors([load, alone]),
            }
        )
        run.keep("overhead.fake_engine", rows, None)
