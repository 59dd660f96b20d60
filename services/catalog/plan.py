"""What a run does next, as one pure function of what is committed and what is ready.

In: a `Situation`, read from the database and the replicas' announcements in one go. Out: the state that
the run is in and one action. Invariant: the same situation gives the same answer, so that a repeated
event, a restart and the periodic look all lead to the same next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["running", "evaluating", "promoting"]


@dataclass(frozen=True)
class Goal:
    """What the request asks for. `reference`: whose score the gate compares with; without a parent
    revision, the parent is the base model."""

    method: Literal["sft", "grpo"]
    steps: int
    save_every: int | None = None
    evaluates: bool = False
    at_least: float | None = None
    no_worse_than: Literal["parent", "base"] | None = None
    promote_to: str | None = None


@dataclass(frozen=True)
class Situation:
    """A run now. `done`: optimizer steps committed; `record`: the rollout record of step done + 1 is
    committed; `exported`, `revision`: those of step `done`. `ready`: revision → replicas that have it
    ready; `failed`: revision → why replicas gave it up, where none has it ready. `waited_s`: how long
    the run has waited for the revision `waiting_for`. Scores are None until they exist."""

    goal: Goal
    parent: str | None = None
    open_command: str | None = None
    done: int = 0
    record: bool = False
    exported: bool = False
    revision: str | None = None
    ready: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    waiting_for: str | None = None
    waited_s: float = 0.0
    ready_timeout_s: float = 900.0
    min_ready: int = 1
    score: float | None = None
    reference_score: float | None = None
    alias_expected: int = 0
    alias_version: int = 0
    alias_moved_by: str = ""


@dataclass(frozen=True)
class Wait:
    """For the open command."""

    command_id: str


@dataclass(frozen=True)
class AwaitReady:
    revision: str


@dataclass(frozen=True)
class Rollout:
    """Sample `step` with `revision` (None = the base model)."""

    step: int
    revision: str | None


@dataclass(frozen=True)
class Update:
    step: int
    export: bool


@dataclass(frozen=True)
class Export:
    step: int


@dataclass(frozen=True)
class Register:
    step: int


@dataclass(frozen=True)
class Evaluate:
    """`target` names the command; `revision` None = the base model."""

    target: Literal["parent", "base", "last"]
    revision: str | None


@dataclass(frozen=True)
class Promote:
    revision: str
    alias: str


@dataclass(frozen=True)
class Complete:
    """Over, without an alias moved."""

    outcome: str


@dataclass(frozen=True)
class Fail:
    reason: str


Action = Wait | AwaitReady | Rollout | Update | Export | Register | Evaluate | Promote | Complete | Fail


@dataclass(frozen=True)
class Next:
    state: State
    action: Action


def exports_step(goal: Goal, step: int) -> bool:
    """Whether the result of `step` becomes a revision: every step where the next rollout samples with
    it, else the last one and every `save_every`."""
    if goal.method == "grpo" or step == goal.steps:
        return True
    return goal.save_every is not None and step % goal.save_every == 0


def next_action(now: Situation) -> Next:
    if now.done < now.goal.steps or now.revision is None:
        return Next("running", _train(now))
    if now.goal.evaluates:
        action = _evaluate(now, now.revision)
        if action is not None:
            return Next("evaluating", action)
        shortfall = _shortfall(now)
        if shortfall is not None:
            return Next("evaluating", Complete(f"not promoted: {shortfall}"))
    if now.goal.promote_to is None:
        return Next("evaluating" if now.goal.evaluates else "running", Complete(_unpromoted(now)))
    return Next("promoting", _promote(now, now.revision, now.goal.promote_to))


def _train(now: Situation) -> Action:
    if now.open_command is not None:
        return Wait(now.open_command)
    if now.done and exports_step(now.goal, now.done):
        if not now.exported:
            return Export(now.done)
        if now.revision is None:
            return Register(now.done)
    step = now.done + 1
    if now.goal.method == "grpo" and not now.record:
        revision = now.revision if now.done else now.parent
        return _once_ready(now, revision) or Rollout(step, revision)
    return Update(step, exports_step(now.goal, step))


def _evaluate(now: Situation, last: str) -> Action | None:
    """The reference's score first, so that a run whose reference cannot be scored ends before the
    longer part; None when every score that the run needs exists."""
    if now.open_command is not None:
        return Wait(now.open_command)
    if now.goal.no_worse_than is not None and now.reference_score is None:
        revision = now.parent if now.goal.no_worse_than == "parent" else None
        return _once_ready(now, revision) or Evaluate("base" if revision is None else "parent", revision)
    if now.score is None:
        return _once_ready(now, last) or Evaluate("last", last)
    return None


def _shortfall(now: Situation) -> str | None:
    goal, score, reference = now.goal, now.score, now.reference_score
    if score is None:
        return None
    if goal.at_least is not None and score < goal.at_least:
        return f"score {score:.4g} is below at_least {goal.at_least:.4g}"
    if goal.no_worse_than is not None and reference is not None and score < reference:
        return f"score {score:.4g} is below {_reference(now)}'s {reference:.4g}"
    return None


def _reference(now: Situation) -> str:
    if now.goal.no_worse_than == "parent" and now.parent is not None:
        return f"the parent {now.parent}"
    return "the base model"


def _unpromoted(now: Situation) -> str:
    scored = "" if now.score is None else f" with score {now.score:.4g}"
    return f"{now.revision} is registered{scored}; not promoted: the request names no alias (promote_to is null)"


def _promote(now: Situation, last: str, alias: str) -> Action:
    if now.open_command is not None:
        return Wait(now.open_command)
    if now.alias_version != now.alias_expected:
        return Complete(f"not promoted: alias moved by {now.alias_moved_by}")
    waiting = _once_ready(now, last, now.min_ready)
    if isinstance(waiting, Fail):
        return Complete(f"not promoted: {waiting.reason}") if last not in now.failed else waiting
    return waiting or Promote(last, alias)


def _once_ready(now: Situation, revision: str | None, replicas: int = 1) -> AwaitReady | Fail | None:
    """None when sampling with `revision` can begin; the base model always can."""
    if revision is None or now.ready.get(revision, 0) >= replicas:
        return None
    if revision in now.failed:
        return Fail(f"{revision} could not be loaded for serving: {now.failed[revision]}")
    if now.waiting_for == revision and now.waited_s > now.ready_timeout_s:
        return Fail(
            f"{revision} was ready on {now.ready.get(revision, 0)} of {replicas} needed serving replicas "
            f"after {now.ready_timeout_s:.0f} s; see that a serving replica of this base model is up and can load it"
        )
    return AwaitReady(revision)
