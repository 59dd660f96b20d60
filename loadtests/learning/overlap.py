"""K GRPO policies through the whole stack: all at once against one after the other, and peak memory."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from typing import Any

from cli.stack.bases import SMOLLM2_NAME
from loadtests.learning.stack import Stack

STEPS = 2
BOUND = 1.3
"""What two cores allow sampling and training together: 64/93 + 115/345 to 81/93 + 158/345 of either alone."""


def measure(stack: Stack, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    stack.train(_request("warm-up"))
    figures = []
    for count in counts:
        began = time.monotonic()
        for number in range(count):
            stack.wait([stack.start(_request(f"alone-{count}-{number}"))])
        alone = time.monotonic() - began
        views = stack.wait([stack.start(_request(f"together-{count}-{number}")) for number in range(count)])
        together = _seconds(views)
        figures.append(
            {"policies": count, "sequential_s": alone, "concurrent_s": together, "speedup": alone / together,
             "of_bound": alone / together / BOUND}
        )  # fmt: skip
        print(f"{count} policies: {alone:.0f} s one by one, {together:.0f} s together", file=sys.stderr, flush=True)
    return figures


def _seconds(views: list[dict[str, Any]]) -> float:
    begun = min(datetime.fromisoformat(view["created_at"]) for view in views)
    ended = max(datetime.fromisoformat(view["ended_at"]) for view in views)
    return (ended - begun).total_seconds()


def _request(name: str) -> dict[str, Any]:
    """Every group is trained on, so that each step costs the same whatever the answers are worth."""
    return {
        "policy": f"bench/{name}", "base": SMOLLM2_NAME, "promote_to": None,
        "method": {
            "kind": "grpo", "task": {"kind": "arithmetic"}, "steps": STEPS, "prompts_per_step": 12,
            "group_size": 8, "max_tokens": 8, "drop_zero_variance": False,
            "optimizer": {"learning_rate": 1e-4},
        },
    }  # fmt: skip
