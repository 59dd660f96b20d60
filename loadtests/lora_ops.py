"""What LoRA costs on CPU: vLLM's own operators against the ones grouped by slot, at two maximum ranks.

`python -m loadtests.lora_ops [--to FILE]` starts four engines one after the other on the converted
SmolLM2 (`make setup` makes it), each in a process of its own, with three adapters of rank 8, and
prints tokens per second: the median of three rounds after a warm-up, and as a ratio to the first row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.bases import Base, load_base
from shared.engine.create import create_engine
from shared.engine.port import InferenceEngine, SampleRequest, SamplingSettings
from shared.engine.settings import EngineSettings
from tests.adapters import write_adapter

CASES = (("grouped", 8), ("grouped", 32), ("stock", 8), ("stock", 32))
REVISIONS = tuple(f"bench/p{number}@1" for number in range(3))
BATCHES: dict[str, tuple[str | None, ...]] = {"base": (None,), "adapters": REVISIONS, "mixed": (None, *REVISIONS)}
PROMPT = (1, 4093, 198, 1780, 314, 216, 34, 33, 27, 34, 47, 2, 198)
TOKENS, SEQUENCES, ROUNDS = 24, 16, 3
MARK = "figures: "


async def rate(engine: InferenceEngine, revisions: tuple[str | None, ...]) -> float:
    """Tokens per second of one batch: SEQUENCES sequences on each revision at once."""

    async def ask(revision: str | None) -> int:
        settings = SamplingSettings(max_tokens=TOKENS)
        request = SampleRequest(f"bench {revision}", PROMPT, settings, revision=revision, n=SEQUENCES, seed=1)
        return sum([len(chunk.token_ids) async for chunk in engine.sample(request)])

    began = time.monotonic()
    tokens = sum(await asyncio.gather(*(ask(revision) for revision in revisions)))
    return tokens / (time.monotonic() - began)


def smollm2() -> Base:
    cache = Path(os.environ.get("MINT_CACHE", "~/.cache/mint")).expanduser()
    return load_base("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m", cache / "bases" / "smollm2-135m")


async def measure(ops: str, max_rank: int) -> dict[str, Any]:
    if ops == "stock":
        from shared.engine.vllm import grouped

        grouped.VERSIONS = frozenset()
    base = await asyncio.to_thread(smollm2)
    with tempfile.TemporaryDirectory() as directory:
        settings = EngineSettings(Path(directory) / "state", slots=3, max_resident=4, max_rank=max_rank, threads=2)
        engine = await asyncio.to_thread(create_engine, "vllm", base, settings)
        try:
            for seed, revision in enumerate(REVISIONS):
                where = Path(directory) / revision.replace("/", "-")
                await engine.load(write_adapter(where, base, revision, seed=seed), where)
            found: dict[str, Any] = {"ops": ops, "max_rank": max_rank}
            for name, revisions in BATCHES.items():
                await rate(engine, revisions)
                found[name] = statistics.median([await rate(engine, revisions) for _ in range(ROUNDS)])
            return found
        finally:
            await engine.close()


def in_a_process(ops: str, max_rank: int) -> dict[str, Any]:
    """Raises RuntimeError with the end of the engine's log when it failed."""
    command = [sys.executable, "-m", "loadtests.lora_ops", "--case", ops, str(max_rank)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
    raise RuntimeError(f"{ops} at max rank {max_rank} gave no figures:\n{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=Path("build/lora_ops.json"))
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case:
        print(MARK + json.dumps(asyncio.run(measure(chosen.case[0], int(chosen.case[1])))), flush=True)
        return
    console = Console()
    rows: list[dict[str, Any]] = []
    chosen.to.parent.mkdir(parents=True, exist_ok=True)
    for ops, max_rank in CASES:
        console.print(f"starting vLLM: {ops} operators, max rank {max_rank} …")
        rows.append(in_a_process(ops, max_rank))
        chosen.to.write_text(json.dumps(rows, indent=2) + "\n")
        console.print(", ".join(f"{name} {rows[-1][name]:.0f} tok/s" for name in BATCHES))
    table = Table("operators", "max rank", "base tok/s", "3 adapters tok/s", "base + 3 tok/s", "3 adapters, ratio")
    for row in rows:
        rates = [f"{row[name]:.0f}" for name in BATCHES]
        table.add_row(row["ops"], str(row["max_rank"]), *rates, f"{row['adapters'] / rows[0]['adapters']:.2f}")
    console.print(table)
    console.print(f"written to {chosen.to}")


if __name__ == "__main__":
    main()
