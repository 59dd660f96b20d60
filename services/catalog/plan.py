"""What a run does next, as one pure function of what is committed and what is ready.

In: a `Situation`, read from the database and the replicas' announcements in one go. Out: the state that
the run is in and one action; asked again after each command that it issued, until it waits. Invariant: the
same situation gives the same answer, so that a repeated event, a restart and the periodic look all lead to
the same next step. A run has at most 1 + staleness open commands: the one that the training waits for, and
rollouts beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from services.catalog import verdict
from services.catalog.actions import (
    Action,
    AwaitReady,
    Complete,
    DropRollouts,
    Evaluate,
    Export,
    Fail,
    Next,
    Promote,
    Register,
    Rollout,
    State,
    Update,
    Wait,
)
from services.catalog.goal import (
    Goal,
    exports_step,
    first_step,
    last_record,
    may_export,
    sampled_after,
    scores_step,
    use_of,
)

__all__ = [
    "Action",
    "AwaitReady",
    "Complete",
    "DropRollouts",
    "Evaluate",
    "Export",
    "Fail",
    "Goal",
    "Next",
    "Promote",
    "Register",
    "Rollout",
    "Situation",
    "State",
    "Update",
    "Wait",
    "exports_step",
    "next_action",
    "once_ready",
]


class Readied(Protocol):
    """The part of a situation that says whether a revision can be sampled with."""

    @property
    def ready(self) -> Mapping[str, int]: ...
    @property
    def failed(self) -> Mapping[str, str]: ...
    @property
    def waiting_for(self) -> str | None: ...
    @property
    def waited_s(self) -> float: ...
    @property
    def ready_timeout_s(self) -> float: ...


@dataclass(frozen=True)
class Situation:
    """A run now.

    `done`: optimizer steps committed, `skipped` of them in a row at the end; `tokens`: sampled and trained
    on. `working`: the kind of the open command that is no rollout; `records`: record → its rollout is open
    or committed, from the record of step done + 1 on. `exported`: that of step `done`. `revisions` and
    `scores` by step: those of step `done`, of scored steps, and those that rollouts may need. `ready`:
    revision → replicas that have it ready; `failed`: revision → why replicas gave it up, where none has it
    ready. `waited_s`: how long the run has waited for the revision `waiting_for`."""

    goal: Goal
    parent: str | None = None
    working: Literal["update", "export", "evaluation"] | None = None
    done: int = 0
    skipped: int = 0
    tokens: int = 0
    records: Mapping[int, Literal["open", "committed"]] = field(default_factory=dict)
    exported: bool = False
    revisions: Mapping[int, str] = field(default_factory=dict)
    scores: Mapping[int, float] = field(default_factory=dict)
    reference_score: float | None = None
    ready: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    waiting_for: str | None = None
    waited_s: float = 0.0
    ready_timeout_s: float = 900.0
    min_ready: int = 1
    alias_expected: int = 0
    alias_version: int = 0
    alias_moved_by: str = ""

    @property
    def open_rollouts(self) -> int:
        return sum(state == "open" for state in self.records.values())


def next_action(now: Situation) -> Next:
    hopeless = verdict.skipped_reason(now.goal, now.skipped, now.done)
    if hopeless is not None:
        return Next("running", Fail(hopeless))
    if not _trained(now):
        return Next("running", _train(now))
    if now.open_rollouts:
        return Next("running", DropRollouts())
    if now.done not in now.revisions:
        return Next("running", Wait() if now.working else _become_revision(now))
    return _finish(now)


def _trained(now: Situation) -> bool:
    """Whether `done` is the run's last step."""
    if now.done == now.goal.steps:
        return True
    return now.done > 0 and now.working != "update" and _stopped(now) is not None


def _stopped(now: Situation) -> str | None:
    return verdict.stop_reason(now.goal, now.scores, now.tokens)


def _train(now: Situation) -> Action:
    """The work in hand first, then what can be sampled beside it, unless no further step will be made."""
    work = Wait() if now.working else _work(now)
    if not isinstance(work, Wait | AwaitReady):
        return work
    if not now.goal.samples or _stopped(now) is not None:
        return work
    busy = now.working is not None or isinstance(work, AwaitReady)
    sampling = _sample(now, now.goal.staleness + (0 if busy else 1))
    if isinstance(work, AwaitReady) and not isinstance(sampling, Rollout | Fail):
        return work
    return sampling


def _work(now: Situation) -> Action:
    """The next update, or what must come before it. Wait: for the record that it learns from."""
    goal, done = now.goal, now.done
    if done and exports_step(goal, done):
        if done not in now.revisions:
            return _become_revision(now)
        if scores_step(goal, done) and done not in now.scores:
            revision = now.revisions[done]
            return once_ready(now, revision) or Evaluate(done, revision)
    step = done + 1
    if goal.samples and now.records.get(use_of(goal, step).record) != "committed":
        return Wait()
    return Update(step, may_export(goal, step))


def _become_revision(now: Situation) -> Action:
    return Register(now.done) if now.exported else Export(now.done)


def _sample(now: Situation, most: int) -> Action:
    """The first rollout that is not asked for yet, while fewer than `most` are open; records are asked for
    in order, each once the revision that it is sampled with is there."""
    goal = now.goal
    current = use_of(goal, now.done + 1).record
    for record in range(current, min(current + goal.staleness, last_record(goal)) + 1):
        if record in now.records:
            continue
        after = sampled_after(goal, record)
        revision = now.revisions.get(after) if after else now.parent
        if (after and revision is None) or now.open_rollouts >= most:
            return Wait()
        return once_ready(now, revision) or Rollout(first_step(goal, record), revision)
    return Wait()


def _finish(now: Situation) -> Next:
    goal = now.goal
    if goal.evaluates:
        action = _evaluate(now, now.revisions[now.done])
        if action is not None:
            return Next("evaluating", action)
    picked = verdict.pick(goal, now.done, now.scores)
    revision = now.revisions[picked.step]
    lacks = verdict.shortfall(goal, picked, revision, now.reference_score, _reference(now))
    if lacks is not None:
        return Next("evaluating", Complete(f"not promoted: {lacks}{_ending(now)}", revision))
    if goal.promote_to is None:
        state: State = "evaluating" if goal.evaluates else "running"
        return Next(state, Complete(f"{_unpromoted(picked, revision)}{_ending(now)}", revision))
    return Next("promoting", _promote(now, picked, revision, goal.promote_to))


def _evaluate(now: Situation, last: str) -> Action | None:
    """The reference's score first, so that a run whose reference cannot be scored ends before the
    longer part; None when every score that the run needs exists."""
    if now.working:
        return Wait()
    if now.goal.no_worse_than is not None and now.reference_score is None:
        revision = now.parent if now.goal.no_worse_than == "parent" else None
        return once_ready(now, revision) or Evaluate("base" if revision is None else "parent", revision)
    if now.done not in now.scores:
        return once_ready(now, last) or Evaluate("last", last)
    return None


def _reference(now: Situation) -> str:
    if now.goal.no_worse_than == "parent" and now.parent is not None:
        return f"the parent {now.parent}"
    return "the base model"


def _ending(now: Situation) -> str:
    """For the outcome: whether, where and why the training ended early."""
    reason = _stopped(now) if now.done < now.goal.steps else None
    return f"; stopped after step {now.done} of {now.goal.steps}: {reason}" if reason else ""


def _unpromoted(picked: verdict.Pick, revision: str) -> str:
    best = f", the best of {picked.of} scores" if picked.of else ""
    scored = "" if picked.score is None else f" with score {picked.score:.4g}{best}"
    return f"{revision} is registered{scored}; not promoted: the request names no alias (promote_to is null)"


def _promote(now: Situation, picked: verdict.Pick, revision: str, alias: str) -> Action:
    if now.alias_version != now.alias_expected:
        return Complete(f"not promoted: alias moved by {now.alias_moved_by}{_ending(now)}", revision)
    waiting = once_ready(now, revision, now.min_ready)
    if isinstance(waiting, Fail) and revision not in now.failed:
        return Complete(f"not promoted: {waiting.reason}{_ending(now)}", revision)
    best = f" (step {picked.step}), the best of {picked.of} scores with {picked.score:.4g}" if picked.of else ""
    return waiting or Promote(revision, alias, f"{best}{_ending(now)}")


def once_ready(now: Readied, revision: str | None, replicas: int = 1) -> AwaitReady | Fail | None:
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
