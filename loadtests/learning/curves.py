"""Learning: GRPO on sums and on three tasks of reasoning-gym, SFT's NLL, DPO's margin; before and after."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cli.stack.bases import SMOLLM2_NAME
from loadtests.learning.stack import Stack

TASKS: dict[str, dict[str, Any]] = {
    "sums": {"kind": "arithmetic"},
    "products": {
        "kind": "reasoning_gym", "name": "products",
        "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    },
    "chain_sum": {
        "kind": "reasoning_gym", "name": "chain_sum",
        "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    },
    "needle_haystack": {
        "kind": "reasoning_gym", "name": "needle_haystack",
        "config": {"min_num_statements": 3, "max_num_statements": 6},
    },
}  # fmt: skip
SFT_STEPS, GRPO_STEPS, DPO_STEPS, ITEMS = 3, 12, 8, 128
"""So few steps of SFT that answers have their form and much is left to find out by trying."""


def measure(stack: Stack, folder: Path) -> Iterator[dict[str, Any]]:
    """A row as soon as it is known; the picture with the last."""
    curves = {}
    for name, task in TASKS.items():
        sft = stack.train(sft_request(name, task))
        grpo = stack.train(grpo_request(name, task))
        base, after_sft, after_grpo = _scores(sft, grpo)
        curves[name] = (_series(sft, "nll"), [step["reward"] for step in grpo["steps"]])
        yield {
            "task": name, "base": base, "after_sft": after_sft, "after_grpo": after_grpo,
            "gain_by_grpo": after_grpo - after_sft, "nll": [curves[name][0][0], curves[name][0][-1]],
            "reward": _ends(curves[name][1]), "reward_by_step": [round(it, 3) for it in curves[name][1]],
        }  # fmt: skip
    dpo = stack.train(dpo_request(stack, folder))
    margin = _series(dpo, "margin")
    draw(curves, margin, folder / "learning.png")
    yield {"task": "sums, DPO", "margin": _ends(margin), "accuracy": _ends(_series(dpo, "accuracy"))}


def evaluation(task: dict[str, Any]) -> dict[str, Any]:
    return {"task": task, "items": ITEMS, "max_tokens": 6, "gate": {"no_worse_than": "base"}}


def sft_request(name: str, task: dict[str, Any]) -> dict[str, Any]:
    return {
        "policy": f"bench/{name.replace('_', '-')}", "base": SMOLLM2_NAME, "seed": 7,
        "method": {
            "kind": "sft", "data": {"kind": "task", "task": task}, "steps": SFT_STEPS, "batch_size": 32,
            "optimizer": {"learning_rate": 1e-3},
        },
        "evaluation": evaluation(task),
    }  # fmt: skip


def grpo_request(name: str, task: dict[str, Any]) -> dict[str, Any]:
    return {
        "policy": f"bench/{name.replace('_', '-')}", "base": SMOLLM2_NAME, "seed": 8,
        "method": {
            "kind": "grpo", "task": task, "steps": GRPO_STEPS, "prompts_per_step": 16, "group_size": 8, "max_tokens": 6,
            "optimizer": {"learning_rate": 5e-4, "warmup_steps": 2, "schedule": "cosine", "final_ratio": 0.1},
        },
        "evaluation": evaluation(task),
    }  # fmt: skip


def dpo_request(stack: Stack, folder: Path) -> dict[str, Any]:
    """Right sums against sums that are off by 1 to 9, from the policy that GRPO made."""
    draw = random.Random(3)
    lines = []
    for _ in range(400):
        a, b, off = draw.randint(0, 99), draw.randint(0, 99), draw.choice([-1, 1]) * draw.randint(1, 9)
        lines.append(json.dumps({"prompt": f"What is {a}+{b}?", "chosen": str(a + b), "rejected": str(a + b + off)}))
    data = stack.upload(str(folder / "pairs.jsonl"), "\n".join(lines).encode())
    return {
        "policy": "bench/sums", "base": SMOLLM2_NAME, "seed": 9, "promote_to": None,
        "method": {
            "kind": "dpo", "data": {"kind": "jsonl", "data": data}, "steps": DPO_STEPS, "batch_size": 16,
            "optimizer": {"learning_rate": 5e-4},
        },
    }  # fmt: skip


def _scores(sft: dict[str, Any], grpo: dict[str, Any]) -> tuple[float, float, float]:
    found = {score["revision"]: score["score"] for run in (sft, grpo) for score in run["scores"]}
    return found[None], found[sft["revision"]], found[grpo["revision"]]


def _series(run: dict[str, Any], metric: str) -> list[float]:
    updates = [entry["body"] for entry in run["journal"] if entry["type"].endswith("policy.updated")]
    return [body["metrics"][metric] for body in updates if metric in body["metrics"]]


def _ends(series: Sequence[float]) -> list[float]:
    """Means of the first and of the last three."""
    return [sum(series[:3]) / 3, sum(series[-3:]) / 3]


def draw(curves: dict[str, tuple[list[float], list[float]]], margin: Sequence[float], path: Path) -> None:
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    nll, reward, dpo = figure.subplots(1, 3)
    for name, (losses, rewards) in curves.items():
        nll.plot(range(1, len(losses) + 1), losses, marker="o", label=name)
        reward.plot(range(1, len(rewards) + 1), rewards, marker="o", label=name)
    dpo.plot(range(1, len(margin) + 1), margin, marker="o", color="black")
    for axes, title in (
        (nll, "SFT: NLL of the answer, nats a token"),
        (reward, "GRPO: mean reward"),
        (dpo, "DPO: margin, nats"),
    ):
        axes.set_title(title)
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
    nll.legend()
    reward.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
