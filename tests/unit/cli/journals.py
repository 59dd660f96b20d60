"""Runs as the gateway gives them: the view and the journal of a run that went the usual way."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any

from cli.gateway import Gateway

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
TASK = {"kind": "arithmetic"}
METHODS: dict[str, dict[str, Any]] = {
    "sft": {"kind": "sft", "data": {"kind": "task", "task": TASK}},
    "dpo": {"kind": "dpo", "data": {"kind": "jsonl", "data": {"key": "data/acme/x", "sha256": "0" * 64, "size": 9}}},
    "grpo": {"kind": "grpo", "task": TASK, "kl": {"coefficient": 0.02}},
}


class Recorder:
    """Facts in order, each `seconds` after the one before."""

    def __init__(self) -> None:
        self.at, self.entries = START, list[dict[str, Any]]()

    def add(self, kind: str, seconds: float = 0.0, **body: Any) -> None:
        self.at += timedelta(seconds=seconds + 0.4)
        fact = {"run_id": "r", "policy": "acme/adder", "base": BASE, "seconds": seconds, **body}
        at = self.at.isoformat()
        self.entries.append({"seq": len(self.entries) + 1, "at": at, "type": f"mint.v1.{kind}", "body": fact})


def recorded(
    method: str = "grpo",
    steps: int = 12,
    per_record: int = 1,
    skipped: tuple[int, ...] = (),
    score_every: int = 4,
    run_id: str = "7c1e55d0-5d0e-5f1c-9a35-1d2a3b4c5d6e",
    seed: int = 0,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(run, journal); the first score is that of the base."""
    rng, facts = random.Random(seed), Recorder()
    facts.add("run.running", state="running")
    facts.add("revision.evaluated", 6.2, revision=None, score=0.11, items=256)
    for step in range(1, steps + 1):
        done = step / steps
        if method == "grpo" and (step - 1) % per_record == 0:
            reward = 0.1 + 0.75 * (1 - math.exp(-3 * done)) + rng.gauss(0, 0.02)
            sampled_by = f"acme/adder@{step - 1}" if step > 1 else None
            figures = {"groups": 12, "trajectories": 96, "tokens": 380, "reward_mean": reward, "revision": sampled_by}
            facts.add("rollout.completed", 4.1 + rng.random(), step=step, **figures)
        gone = step in skipped
        metrics = _metrics(method, done, rng, gone) | {"optimizer_step": float(step)}
        facts.add("policy.updated", 2.3 + rng.random(), step=step, skipped=gone, metrics=metrics)
        if step == steps or step % score_every == 0 or (method == "grpo" and step % per_record == 0):
            facts.add("revision.exported", 0.3, step=step)
            facts.add("revision.registered", step=step, revision=f"acme/adder@{step}", number=step)
        if step == steps or step % score_every == 0:
            score = 0.11 + 0.7 * done + rng.gauss(0, 0.01)
            facts.add("revision.evaluated", 6.0, revision=f"acme/adder@{step}", score=score, items=256)
    facts.add("alias.moved", alias="live", revision=f"acme/adder@{steps}", reason="promotion")
    facts.add("run.completed", outcome=f"promoted acme/adder@{steps} to live")
    return _view(method, steps, per_record, run_id, facts), facts.entries


def _metrics(method: str, done: float, rng: random.Random, skipped: bool) -> dict[str, float]:
    if skipped:
        return {"kept_groups": 0.0, "dropped_groups": 12.0, "completion_tokens_mean": 4.0, "completion_tokens_max": 6.0}
    common = {
        "loss": math.exp(-2 * done) + rng.gauss(0, 0.03),
        "grad_norm": 0.9 + rng.random() * 0.4,
        "learning_rate": 5e-4 * min(1.0, done * 10) * (1 + math.cos(math.pi * done)) / 2,
        "tokens": 380.0,
    }
    if method == "sft":
        return common | {"nll": common["loss"], "rows": 32.0}
    if method == "dpo":
        return common | {"margin": 2 * done + rng.gauss(0, 0.1), "accuracy": min(1.0, 0.5 + done / 2)}
    return common | {
        "loss": rng.gauss(0, 0.02),
        "kl": 0.08 * done * done + 0.001 * rng.random(),
        "mismatch_mean": 0.009 + 0.002 * rng.random(),
        "mismatch_max": 0.1 + 0.2 * rng.random(),
        "ratio_mean": 1 + rng.gauss(0, 0.003),
        "effective_sample_size": 0.99,
        "clip_share": 0.02 * rng.random(),
        "completion_tokens_mean": 3.5 + done + rng.random() * 0.2,
        "completion_tokens_max": float(6 + rng.randrange(3)),
        "truncated_share": max(0.0, 0.2 - 0.2 * done),
    }


def _view(method: str, steps: int, per_record: int, run_id: str, facts: Recorder) -> dict[str, Any]:
    asked = METHODS[method] | {"steps": steps} | ({"minibatches": per_record} if method == "grpo" else {})
    return {
        "run_id": run_id,
        "policy": "acme/adder",
        "base": BASE,
        "method": method,
        "state": "completed",
        "step": steps,
        "steps": steps,
        "outcome": facts.entries[-1]["body"]["outcome"],
        "created_at": START.isoformat(),
        "started_at": START.isoformat(),
        "ended_at": facts.at.isoformat(),
        "revision": f"acme/adder@{steps}",
        "promoted": True,
        "request_source": "acme/shop",
        "request_id": "adder-1",
        "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
        "request": {"policy": "acme/adder", "base": BASE, "method": asked},
    }


class Recorded(Gateway):
    """Answers from recorded runs, by their ids."""

    def __init__(self, *runs: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
        super().__init__("http://gateway")
        self.runs = {run["run_id"]: (run, journal) for run, journal in runs}

    def get(self, path: str, **query: Any) -> Any:
        run_id, _, rest = path.removeprefix("/mint/v1/runs/").partition("/")
        run, journal = self.runs[run_id]
        return journal if rest == "journal" else dict(run)
