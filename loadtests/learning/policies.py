"""K policies on one base: time-sliced and batched steps against K runs, one after the other.

`python -m loadtests.learning.policies K SCHEDULE ROWS STEPS` is one measurement in a process of its own.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from loadtests.learning.rig import ADAM, CALL, Rig, answer, apart, go_on, median, peak_bytes, sums, tokens
from services.learner.trainer import Work

SCHEDULES = ("sequential", "sliced", "batched")


def measure(counts: tuple[int, ...], row_counts: tuple[int, ...], steps: int, rounds: int) -> list[dict[str, Any]]:
    figures = []
    for rows in row_counts:
        for count in counts:
            found: dict[str, list[dict[str, Any]]] = {schedule: [] for schedule in SCHEDULES}
            for _ in range(rounds):
                for schedule in SCHEDULES:
                    found[schedule].append(apart(__name__, str(count), schedule, str(rows), str(steps)))
                print(f"{rows} rows, {count} policies: a round is over", file=sys.stderr, flush=True)
            alone = median([it["seconds"] for it in found["sequential"]])
            for schedule in SCHEDULES:
                seconds = median([it["seconds"] for it in found[schedule]])
                figures.append(
                    {
                        "rows": rows, "tokens": found[schedule][0]["tokens"], "policies": count,
                        "schedule": schedule, "tokens_per_s": found[schedule][0]["tokens"] * count * steps / seconds,
                        "speedup": alone / seconds, "peak_bytes": max(it["peak_bytes"] for it in found[schedule]),
                    }
                )  # fmt: skip
    return figures


def one(count: int, schedule: str, rows: int, steps: int) -> dict[str, Any]:
    """Sequential: each policy's steps after the other's; sliced: step by step in turn; batched: joint."""
    rig = Rig(capacity=count)
    slots = [rig.fresh(f"bench/p{number}") for number in range(count)]
    data = [sums(rows, seed=number) for number in range(count)]
    rig.trainer.forward_backward(slots[0], data[0], CALL, go_on)
    rig.trainer.optim_step(slots[0], ADAM)
    began = time.perf_counter()
    if schedule == "batched":
        for _ in range(steps):
            works = [Work(slot, its, CALL, go_on) for slot, its in zip(slots, data, strict=True)]
            for outcome in rig.trainer.forward_backward_batch(works):
                if isinstance(outcome, Exception):
                    raise outcome
            for slot in slots:
                rig.trainer.optim_step(slot, ADAM)
    else:
        order = [(p, s) for p in range(count) for s in range(steps)]
        for policy, _ in order if schedule == "sequential" else sorted(order, key=lambda it: it[1]):
            rig.trainer.forward_backward(slots[policy], data[policy], CALL, go_on)
            rig.trainer.optim_step(slots[policy], ADAM)
    return {"seconds": time.perf_counter() - began, "peak_bytes": peak_bytes(), "tokens": tokens(data[0])}


if __name__ == "__main__":
    answer(one(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
