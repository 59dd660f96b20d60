"""What a request asks of its run, and how its steps are numbered.

Pure. Steps count optimizer steps, from 1. A run of rollouts has records, from 1, and each record gets
`steps_per_record` steps. Invariant: every number here follows from the goal and the step alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mint_schemas.training import Gate, Grpo, StopWhen, TrainRequested


@dataclass(frozen=True)
class Goal:
    """`no_worse_than`: whose score the gate compares with; without a parent revision, the parent is the base
    model. `steps_per_record`: epochs × `minibatches`. `staleness`: how many records a rollout may lag
    behind. `target_score`, `no_progress_steps` and `max_tokens` end the training early, at the first that holds."""

    method: Literal["sft", "dpo", "grpo"]
    steps: int
    save_every: int | None = None
    evaluates: bool = False
    at_least: float | None = None
    no_worse_than: Literal["parent", "base"] | None = None
    promote_to: str | None = None
    minibatches: int = 1
    steps_per_record: int = 1
    staleness: int = 0
    eval_every: int | None = None
    promote: Literal["last", "best"] = "last"
    target_score: float | None = None
    no_progress_steps: int | None = None
    max_tokens: int | None = None

    @property
    def samples(self) -> bool:
        """Whether its steps learn from rollouts."""
        return self.method == "grpo"


@dataclass(frozen=True)
class Use:
    """Which part of which record a step learns from. `record_step`: the first step that uses it, the one
    that its rollout is named after. `epoch` and `minibatch` count from 0."""

    record: int
    record_step: int
    epoch: int
    minibatch: int


def goal_of(request: TrainRequested) -> Goal:
    method, stop = request.method, request.stop_when or StopWhen.model_construct()
    gate = request.evaluation.gate if request.evaluation else Gate()
    sampled = method if isinstance(method, Grpo) else None
    return Goal(
        method=method.kind,
        steps=method.steps,
        save_every=None if isinstance(method, Grpo) else method.save_every,
        evaluates=request.evaluation is not None,
        at_least=gate.at_least,
        no_worse_than=gate.no_worse_than,
        promote_to=request.promote_to,
        minibatches=sampled.minibatches if sampled else 1,
        steps_per_record=sampled.steps_per_record if sampled else 1,
        staleness=sampled.staleness if sampled else 0,
        eval_every=request.eval_every,
        promote=request.promote,
        target_score=stop.target_score,
        no_progress_steps=stop.no_progress_steps,
        max_tokens=stop.max_tokens,
    )


def use_of(goal: Goal, step: int) -> Use:
    before, within = divmod(step - 1, goal.steps_per_record)
    epoch, minibatch = divmod(within, goal.minibatches)
    return Use(before + 1, first_step(goal, before + 1), epoch, minibatch)


def first_step(goal: Goal, record: int) -> int:
    return (record - 1) * goal.steps_per_record + 1


def record_at(goal: Goal, record_step: int) -> int:
    return (record_step - 1) // goal.steps_per_record + 1


def last_record(goal: Goal) -> int:
    return record_at(goal, goal.steps)


def sampled_after(goal: Goal, record: int) -> int:
    """The step whose revision samples the record: the last one of record − 1 − staleness. 0 = what the run
    starts from."""
    return max(0, record - 1 - goal.staleness) * goal.steps_per_record


def exports_step(goal: Goal, step: int) -> bool:
    """Whether the result of `step` becomes a revision: the last step, every one that is scored, and where
    rollouts sample with it the last of each record, else every `save_every`."""
    if step == goal.steps or scores_step(goal, step):
        return True
    every = goal.steps_per_record if goal.samples else goal.save_every
    return every is not None and step % every == 0


def scores_step(goal: Goal, step: int) -> bool:
    """Whether the revision of `step` is scored before the training goes on."""
    return goal.eval_every is not None and step % goal.eval_every == 0 and step < goal.steps


def may_export(goal: Goal, step: int) -> bool:
    """Whether the result of `step` may become a revision: a token budget can run out at any step, and
    scores end a run at steps that are scored."""
    return goal.max_tokens is not None or exports_step(goal, step)
