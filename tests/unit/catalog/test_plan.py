"""The plan is a pure function: every stage of both flows, every gate outcome, and a walk over all runs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from services.catalog import plan
from services.catalog.plan import Goal, Next, Situation, next_action

SFT = Situation(Goal("sft", 4, save_every=2, promote_to="live"))
GRPO = Situation(Goal("grpo", 3, promote_to="live"))
READY = {"p@1": 1, "p@2": 1, "p@3": 1, "p@9": 1}


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (SFT, plan.Update(1, export=False)),
        (replace(SFT, done=1), plan.Update(2, export=True)),
        (replace(SFT, done=2), plan.Export(2)),
        (replace(SFT, done=2, exported=True), plan.Register(2)),
        (replace(SFT, done=2, exported=True, revisions={2: "p@1"}), plan.Update(3, export=False)),
        (replace(SFT, done=3), plan.Update(4, export=True)),
        (replace(SFT, done=4), plan.Export(4)),
        (replace(SFT, done=4, exported=True), plan.Register(4)),
        (GRPO, plan.Rollout(1, None)),
        (replace(GRPO, records={1: "open"}), plan.Wait()),
        (replace(GRPO, records={1: "committed"}), plan.Update(1, export=True)),
        (replace(GRPO, parent="p@9"), plan.AwaitReady("p@9")),
        (replace(GRPO, parent="p@9", ready=READY), plan.Rollout(1, "p@9")),
        (replace(GRPO, done=1), plan.Export(1)),
        (replace(GRPO, done=1, exported=True), plan.Register(1)),
        (replace(GRPO, done=1, exported=True, revisions={1: "p@1"}), plan.AwaitReady("p@1")),
        (replace(GRPO, done=1, exported=True, revisions={1: "p@1"}, ready=READY), plan.Rollout(2, "p@1")),
        (
            replace(GRPO, done=1, exported=True, revisions={1: "p@1"}, records={2: "committed"}),
            plan.Update(2, export=True),
        ),
        (replace(GRPO, done=3, exported=True), plan.Register(3)),
        (replace(GRPO, records={1: "committed"}, working="update"), plan.Wait()),
        (replace(GRPO, done=1, working="export"), plan.Wait()),
    ],
)
def test_training(now: Situation, expected: plan.Action) -> None:
    assert next_action(now) == Next("running", expected)


TRAINED = Situation(
    Goal("sft", 1, evaluates=True, promote_to="live"),
    parent="p@1",
    done=1,
    exported=True,
    revisions={1: "p@2"},
    ready=READY,
)


def _gate(**gate: object) -> Situation:
    return replace(TRAINED, goal=replace(TRAINED.goal, **gate))


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (TRAINED, Next("evaluating", plan.Evaluate("last", "p@2"))),
        (replace(TRAINED, working="evaluation"), Next("evaluating", plan.Wait())),
        (replace(TRAINED, ready={}), Next("evaluating", plan.AwaitReady("p@2"))),
        (_gate(no_worse_than="parent"), Next("evaluating", plan.Evaluate("parent", "p@1"))),
        (replace(_gate(no_worse_than="parent"), ready={"p@2": 1}), Next("evaluating", plan.AwaitReady("p@1"))),
        (replace(_gate(no_worse_than="parent"), parent=None), Next("evaluating", plan.Evaluate("base", None))),
        (_gate(no_worse_than="base"), Next("evaluating", plan.Evaluate("base", None))),
        (
            replace(_gate(no_worse_than="base"), reference_score=0.1),
            Next("evaluating", plan.Evaluate("last", "p@2")),
        ),
        (replace(TRAINED, scores={1: 0.3}), Next("promoting", plan.Promote("p@2", "live"))),
        (
            replace(_gate(at_least=0.5), scores={1: 0.31}),
            Next("evaluating", plan.Complete("not promoted: score 0.31 is below at_least 0.5", "p@2")),
        ),
        (replace(_gate(at_least=0.5), scores={1: 0.5}), Next("promoting", plan.Promote("p@2", "live"))),
        (
            replace(_gate(no_worse_than="parent"), scores={1: 0.3}, reference_score=0.4),
            Next("evaluating", plan.Complete("not promoted: score 0.3 is below the parent p@1's 0.4", "p@2")),
        ),
        (
            replace(_gate(no_worse_than="parent"), scores={1: 0.4}, reference_score=0.4),
            Next("promoting", plan.Promote("p@2", "live")),
        ),
        (
            replace(_gate(at_least=0.9, no_worse_than="base"), scores={1: 0.5}, reference_score=0.4),
            Next("evaluating", plan.Complete("not promoted: score 0.5 is below at_least 0.9", "p@2")),
        ),
    ],
)
def test_evaluation_and_gate(now: Situation, expected: Next) -> None:
    assert next_action(now) == expected


UNJUDGED = replace(TRAINED, goal=replace(TRAINED.goal, evaluates=False))


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (UNJUDGED, plan.Promote("p@2", "live")),
        (replace(UNJUDGED, ready={}), plan.AwaitReady("p@2")),
        (replace(UNJUDGED, min_ready=2), plan.AwaitReady("p@2")),
        (
            replace(UNJUDGED, alias_expected=3, alias_version=4, alias_moved_by="ann"),
            plan.Complete("not promoted: alias moved by ann", "p@2"),
        ),
        (
            replace(UNJUDGED, ready={}, failed={"p@2": "bad files"}),
            plan.Fail("p@2 could not be loaded for serving: bad files"),
        ),
    ],
)
def test_promotion(now: Situation, expected: plan.Action) -> None:
    assert next_action(now) == Next("promoting", expected)


def test_promotion_that_waits_too_long_completes_unpromoted() -> None:
    now = replace(UNJUDGED, ready={}, waiting_for="p@2", waited_s=901)
    action = next_action(now).action
    assert isinstance(action, plan.Complete)
    assert action.outcome.startswith("not promoted: p@2 was ready on 0 of 1")


def test_without_an_alias_the_run_completes_when_it_is_registered() -> None:
    now = replace(UNJUDGED, goal=replace(UNJUDGED.goal, promote_to=None), ready={})
    assert isinstance(next_action(now).action, plan.Complete)
    judged = replace(TRAINED, goal=replace(TRAINED.goal, promote_to=None), scores={1: 0.25})
    action = next_action(judged).action
    assert isinstance(action, plan.Complete)
    assert "with score 0.25" in action.outcome


def test_a_wait_for_another_revision_does_not_inherit_the_time() -> None:
    now = replace(UNJUDGED, ready={}, waiting_for="p@1", waited_s=10_000)
    assert next_action(now).action == plan.AwaitReady("p@2")


def _carry_out(now: Situation, action: plan.Action) -> Situation:
    """The world after an action succeeded."""
    match action:
        case plan.Rollout(step):
            return replace(now, records={**now.records, step: "committed"})
        case plan.Update(step):
            return replace(now, done=step, exported=False)
        case plan.Export():
            return replace(now, exported=True)
        case plan.Register(step):
            return replace(now, revisions={**now.revisions, step: f"p@{step}"})
        case plan.AwaitReady(revision):
            return replace(now, ready={**now.ready, revision: now.min_ready})
        case plan.Evaluate("last"):
            return replace(now, scores={**now.scores, now.done: 0.5})
        case plan.Evaluate():
            return replace(now, reference_score=0.4)
    raise AssertionError(action)


GOALS = [
    Goal(method, steps, save_every, evaluates, at_least, no_worse_than, promote_to)
    for method, steps, save_every, evaluates, at_least, no_worse_than, promote_to in itertools.product(
        ("sft", "dpo", "grpo"),
        (1, 2, 5),
        (None, 1, 2),
        (True, False),
        (None, 0.9),
        (None, "parent", "base"),
        (None, "live"),
    )
]


@pytest.mark.parametrize("parent", [None, "p@0"])
def test_every_goal_reaches_its_end_by_each_update_once(parent: str | None) -> None:
    for goal in GOALS:
        now, steps = Situation(goal, parent=parent), []
        for _ in range(60):
            action = next_action(now).action
            if isinstance(action, plan.Promote | plan.Complete):
                break
            if isinstance(action, plan.Update):
                steps.append(action.step)
                assert action.export == plan.exports_step(goal, action.step)
            now = _carry_out(now, action)
        else:
            raise AssertionError(f"{goal} does not end")
        assert steps == list(range(1, goal.steps + 1)), goal
        passes = not (goal.evaluates and goal.at_least == 0.9)
        assert isinstance(action, plan.Promote) == (goal.promote_to is not None and passes), goal
