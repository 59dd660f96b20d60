"""A run step by step, from its journal: what `run show` draws, `run plot` plots and `run metrics` prints.

In: a run and its journal as the gateway gives them. Out: a `History`. Everything is a committed fact; what no
fact says is absent, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mint_schemas.training import Grpo, TrainRequested
from pydantic import ValidationError

from cli.gateway import Gateway, run_path
from cli.report.collect import STAGES

WAITING = "waiting and loading"
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class History:
    """`steps` are in order, one entry per optimizer step that the journal knows (see `step_objects`).
    `scores` are (step, score) of the run's own revisions; `baseline` that of what it started from."""

    run: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    scores: Points
    baseline: float | None
    seconds: Mapping[str, float]

    @property
    def label(self) -> str:
        return f"{self.run['policy']} {self.run['method']} {str(self.run['run_id'])[:8]}"

    @property
    def skipped(self) -> list[int]:
        return [step["step"] for step in self.steps if step["skipped"]]

    def metric(self, name: str) -> Points:
        found = ((step["step"], step["metrics"].get(name)) for step in self.steps)
        return [(step, float(value)) for step, value in found if _finite(value)]

    def rewards(self, each_step: bool = False) -> Points:
        """One point a record, at the first step that uses it, or one for each step that does."""
        found = [(step["step"], step["rollout"]) for step in self.steps if step["rollout"] is not None]
        return [
            (step, float(rollout["reward_mean"]))
            for step, rollout in found
            if _finite(rollout["reward_mean"]) and (each_step or rollout["record_step"] == step)
        ]


def load_history(gateway: Gateway, run_id: str) -> History:
    run = gateway.get(run_path(run_id))
    return history(run, gateway.get(f"{run_path(run_id)}/journal"))


def history(run: Mapping[str, Any], journal: Sequence[Mapping[str, Any]]) -> History:
    facts = [(entry["type"].removeprefix("mint.v1."), entry["body"]) for entry in journal]
    made = {body["revision"]: body["step"] for kind, body in facts if kind == "revision.registered"}
    scored = [(made.get(body["revision"]), body) for kind, body in facts if kind == "revision.evaluated"]
    before = [float(body["score"]) for step, body in scored if step is None and _finite(body["score"])]
    scores = sorted({step: float(body["score"]) for step, body in scored if step is not None}.items())
    steps = step_objects(run, facts)
    return History(run, steps, scores, before[-1] if before else None, _seconds(run, journal, facts))


def step_objects(run: Mapping[str, Any], facts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One object per optimizer step, as `mint run metrics` writes them.

    `run_id`; `step` from 1; `committed`: whether the step is made (its record may come before it); `skipped`:
    no row was left, so no optimizer step; `metrics`: the figures of `policy.updated` by their names; `rollout`:
    null, or the record's `record_step`, `reward_mean`, `groups`, `trajectories`, `tokens` and `revision`, null
    for the base; `revision`, `score`: of the revision made from the step, else null; `seconds`: by stage, a
    record's rollout with the first of its steps."""
    per_record = _steps_per_record(run)
    made: dict[str, int] = {body["revision"]: body["step"] for kind, body in facts if kind == "revision.registered"}
    steps: dict[int, dict[str, Any]] = {}

    def at(number: int) -> dict[str, Any]:
        return steps.setdefault(number, _empty(run["run_id"], number))

    for kind, body in facts:
        number = made.get(body.get("revision") or "") if kind == "revision.evaluated" else body.get("step")
        if number is None:
            continue
        if kind in STAGES:
            seconds = at(number)["seconds"]
            seconds[STAGES[kind]] = round(seconds.get(STAGES[kind], 0.0) + float(body["seconds"]), 3)
        if kind == "rollout.completed":
            for later in range(number, number + per_record):
                at(later)["rollout"] = _rollout(body)
        elif kind == "policy.updated":
            at(number).update(committed=True, skipped=bool(body.get("skipped")), metrics=dict(body["metrics"]))
        elif kind == "revision.registered":
            at(number)["revision"] = body["revision"]
        elif kind == "revision.evaluated":
            at(number)["score"] = body["score"]
    return [steps[number] for number in sorted(steps)]


def _empty(run_id: str, step: int) -> dict[str, Any]:
    nothing: dict[str, Any] = {"metrics": {}, "rollout": None, "revision": None, "score": None, "seconds": {}}
    return {"run_id": run_id, "step": step, "committed": False, "skipped": False, **nothing}


def _rollout(body: Mapping[str, Any]) -> dict[str, Any]:
    names = ("reward_mean", "groups", "trajectories", "tokens", "revision")
    return {"record_step": body["step"]} | {name: body.get(name) for name in names}


def _steps_per_record(run: Mapping[str, Any]) -> int:
    """1 for a method without records, and for a request that cannot be read."""
    try:
        method = TrainRequested.model_validate(run.get("request") or {}).method
    except ValidationError:
        return 1
    return method.steps_per_record if isinstance(method, Grpo) else 1


def _seconds(
    run: Mapping[str, Any], journal: Sequence[Mapping[str, Any]], facts: Sequence[tuple[str, Mapping[str, Any]]]
) -> dict[str, float]:
    """Work by stage, and what no stage accounts for, up to the end or the last fact. With stages that
    overlap, as sampling and training do under staleness, nothing may be left."""
    spent: dict[str, float] = {}
    for kind, body in facts:
        if kind in STAGES:
            spent[STAGES[kind]] = spent.get(STAGES[kind], 0.0) + float(body["seconds"])
    found = {stage: spent[stage] for stage in STAGES.values() if stage in spent}
    end = run.get("ended_at") or (journal[-1]["at"] if journal else None)
    if found and run.get("started_at") and end:
        wall = (datetime.fromisoformat(end) - datetime.fromisoformat(run["started_at"])).total_seconds()
        found[WAITING] = max(0.0, wall - sum(found.values()))
    return found


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
