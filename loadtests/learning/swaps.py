"""What it costs to give the base to another policy: from a slot, and from a training checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from loadtests.learning.rig import ADAM, CALL, SHAPE, Rig, go_on, median, sums
from services.learner.checkpoint import Origin

ORIGIN = Origin(policy="bench/a", run_id="bench", base="bench", base_sha256="0" * 64, seed=0)


def measure(rounds: int) -> list[dict[str, Any]]:
    rig = Rig(capacity=2)
    a, b = rig.fresh("bench/a"), rig.fresh("bench/b")
    rows = sums(40, seed=1)
    step = _seconds(lambda: _step(rig, a, rows), rounds)
    files = rig.trainer.save(a, ORIGIN, 1)
    size = sum(len(data) for data in files.values())
    cases: dict[str, tuple[Callable[[], object], int]] = {
        "swap between slots": (lambda: (rig.slots.acquire("bench/b", SHAPE), rig.slots.acquire("bench/a", SHAPE)), 0),
        "write a training checkpoint": (lambda: rig.trainer.save(a, ORIGIN, 1), size),
        "restore a training checkpoint": (
            lambda: rig.trainer.load(b, files, ORIGIN.base_sha256, fresh_optimizer=False), size,
        ),
    }  # fmt: skip
    figures: list[dict[str, Any]] = [{"what": "one step of 40 sums", "seconds": step, "bytes": None, "of_a_step": 1.0}]
    for name, (case, moved) in cases.items():
        seconds = _seconds(case, max(rounds, 9))
        figures.append({"what": name, "seconds": seconds, "bytes": moved, "of_a_step": seconds / step})
    return figures


def _step(rig: Rig, slot: Any, rows: Any) -> None:
    rig.trainer.forward_backward(slot, rows, CALL, go_on)
    rig.trainer.optim_step(slot, ADAM)


def _seconds(case: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        case()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])
