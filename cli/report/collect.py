"""A report's content, as plain data for JSON.

In: run ids, the gateway. Out: per run its steps (reward, loss), scores, seconds per stage and revisions.
Everything comes from committed facts; nothing is computed that the catalog does not hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from cli.gateway import Gateway, policy_path, run_path

STAGES = {
    "rollout.completed": "rollout",
    "policy.updated": "update",
    "revision.exported": "export",
    "revision.evaluated": "evaluation",
}

Facts = list[tuple[str, dict[str, Any]]]


def collect(gateway: Gateway, run_ids: Sequence[str]) -> dict[str, Any]:
    """`{"runs": [...], "scores": [...], "lineage": [...], "adapter": {...}}`, runs in the order given."""
    runs = [_run(gateway, run_id) for run_id in run_ids]
    policies = list(dict.fromkeys(run["policy"] for run in runs if run["policy"]))
    revisions = [it for policy in policies for it in gateway.pages(f"{policy_path(policy)}/revisions", 1000)]
    base_bytes = {base["name"]: int(base["bytes"]) for base in gateway.get("/mint/v1/status")["bases"]}
    ids = {run["run_id"] for run in runs}
    ours = sorted((it for it in revisions if it["run_id"] in ids), key=lambda it: (it["policy"], it["number"]))
    return {
        "runs": runs,
        "scores": [score for run in runs for score in run["scores"]],
        "lineage": [_link(it) for it in ours],
        "adapter": _adapter(ours, runs, base_bytes),
    }


def _run(gateway: Gateway, run_id: str) -> dict[str, Any]:
    view = gateway.get(run_path(run_id))
    journal = gateway.get(f"{run_path(run_id)}/journal")
    facts = [(entry["type"].removeprefix("mint.v1."), entry["body"]) for entry in journal]
    stages = _stages(facts)
    wall = _seconds_between(view["started_at"], view["ended_at"])
    if wall is not None:
        stages["waiting and loading"] = max(0.0, wall - sum(stages.values()))
    return {
        **{
            key: view[key] for key in ("run_id", "policy", "base", "method", "state", "outcome", "revision", "promoted")
        },
        "steps": _steps(facts),
        "scores": [_score(run_id, body) for kind, body in facts if kind == "revision.evaluated"],
        "seconds": {name: round(seconds, 2) for name, seconds in stages.items()},
        "wall_seconds": None if wall is None else round(wall, 2),
        "trace_id": (view.get("traceparent") or "--").split("-")[1] or None,
    }


def _steps(facts: Facts) -> list[dict[str, Any]]:
    """One entry a step: reward and the revision that sampled it (where there was a rollout), loss."""
    steps: dict[int, dict[str, Any]] = {}
    for kind, body in facts:
        if kind == "rollout.completed":
            found = {
                "reward": body["reward_mean"],
                "sampled_by": body["revision"],
                "sampler_sha256": body["adapter_sha256"],
            }
            steps.setdefault(body["step"], {}).update(found)
        elif kind == "policy.updated":
            metrics = body.get("metrics", {})
            steps.setdefault(body["step"], {}).update(
                loss=metrics.get("loss"), grad_norm=metrics.get("grad_norm"), skipped=body.get("skipped", False)
            )
    return [{"step": number, **steps[number]} for number in sorted(steps)]


def _stages(facts: Facts) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for kind, body in facts:
        if kind in STAGES:
            seconds[STAGES[kind]] = seconds.get(STAGES[kind], 0.0) + float(body["seconds"])
    return seconds


def _score(run_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"run_id": run_id} | {
        key: body[key] for key in ("revision", "base", "score", "items", "scorer", "task_sha256", "sampling")
    }


def _link(revision: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        "revision",
        "parent",
        "run_id",
        "step",
        "score",
        "aliases",
        "adapter_sha256",
        "adapter_bytes",
        "created_at",
    )
    return {name: revision[name] for name in names}


def _adapter(
    revisions: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]], base_bytes: Mapping[str, int]
) -> dict[str, Any]:
    size = max((int(it["adapter_bytes"]) for it in revisions), default=0)
    base = max((base_bytes.get(run["base"] or "", 0) for run in runs), default=0)
    return {"bytes": size, "base_bytes": base or None, "share": round(size / base, 6) if base else None}


def _seconds_between(start: str | None, end: str | None) -> float | None:
    if start is None or end is None:
        return None
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
