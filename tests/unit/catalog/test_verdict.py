"""What scores decide: early ends, the best revision, the gate, and runs that learn nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.catalog import plan, verdict
from services.catalog.goal import Goal
from services.catalog.plan import Next, Situation, next_action

READY = {f"p@{number}": 1 for number in range(1, 10)}
GOAL = Goal("sft", 40, evaluates=True, eval_every=5, promote_to="live")


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ({}, None),
        ({5: 0.3}, None),
        ({5: 0.3, 10: 0.2}, None),
        ({5: 0.3, 10: 0.2, 15: 0.3}, "no evaluation in 10 steps was above the 0.3 of step 5 (no_progress_steps is 7)"),
        ({5: 0.3, 10: 0.4, 15: 0.2}, None),
        ({5: 0.3, 10: 0.2, 15: 0.31}, None),
        ({5: 0.3, 10: 0.4, 15: 0.2, 20: 0.4}, "no evaluation in 10 steps was above the 0.4 of step 10"),
    ],
)
def test_no_progress_counts_from_the_best_evaluation(scores: dict[int, float], says: str | None) -> None:
    reason = verdict.stop_reason(replace(GOAL, no_progress_steps=7), scores, 0)
    assert reason is None if says is None else says in str(reason)


def test_a_reason_to_stop_outlives_a_better_last_score() -> None:
    """A budget may end a run between two evaluations; its last score must not begin it again."""
    goal = replace(GOAL, no_progress_steps=5, target_score=0.9)
    stalled = {5: 0.5, 10: 0.4}
    assert verdict.stop_reason(goal, {**stalled, 12: 0.95}, 0) == verdict.stop_reason(goal, stalled, 0) is not None


def test_only_what_is_scored_on_the_way_can_reach_the_target() -> None:
    goal = replace(GOAL, target_score=0.5)
    assert verdict.stop_reason(goal, {40: 0.9}, 0) is None, "the last step has come anyway"
    assert verdict.stop_reason(goal, {5: 0.4, 10: 0.5}, 0) == "score 0.5 reached target_score 0.5"


def test_a_budget_is_reached_exactly() -> None:
    goal = replace(GOAL, max_tokens=1000)
    assert verdict.stop_reason(goal, {}, 999) is None
    assert verdict.stop_reason(goal, {}, 1000) == "1000 tokens were sampled and trained on, max_tokens is 1000"


BEST = Situation(
    replace(GOAL, promote="best"),
    done=40,
    exported=True,
    revisions={5: "p@1", 10: "p@2", 15: "p@3", 40: "p@4"},
    scores={5: 0.2, 10: 0.6, 15: 0.6, 40: 0.5},
    ready=READY,
)


def test_the_best_revision_is_promoted_the_later_of_two_equals() -> None:
    assert next_action(BEST) == Next(
        "promoting", plan.Promote("p@3", "live", " (step 15), the best of 4 scores with 0.6")
    )
    last = replace(BEST, scores={**BEST.scores, 40: 0.6})
    assert next_action(last).action == plan.Promote("p@4", "live", " (step 40), the best of 4 scores with 0.6")


def test_the_best_revision_must_be_ready_to_be_promoted() -> None:
    assert next_action(replace(BEST, ready={"p@4": 1})).action == plan.AwaitReady("p@3")


def test_the_gate_judges_the_picked_revision() -> None:
    strict = replace(BEST, goal=replace(BEST.goal, at_least=0.55))
    assert isinstance(next_action(strict).action, plan.Promote), "the last alone would not pass"
    assert next_action(replace(BEST, goal=replace(BEST.goal, at_least=0.7))) == Next(
        "evaluating",
        plan.Complete("not promoted: score 0.6 of p@3 (the best of 4 scores) is below at_least 0.7", "p@3"),
    )
    compared = replace(BEST, goal=replace(BEST.goal, no_worse_than="base"), reference_score=0.65)
    action = next_action(compared).action
    assert isinstance(action, plan.Complete)
    assert "score 0.6 of p@3 (the best of 4 scores) is below the base model's 0.65" in action.outcome


def test_without_an_alias_the_best_revision_is_named() -> None:
    action = next_action(replace(BEST, goal=replace(BEST.goal, promote_to=None))).action
    assert isinstance(action, plan.Complete)
    assert action.revision == "p@3"
    assert action.outcome.startswith("p@3 is registered with score 0.6, the best of 4 scores; not promoted")


def test_an_early_end_is_told_whatever_becomes_of_the_run() -> None:
    early = replace(BEST, done=15, goal=replace(BEST.goal, target_score=0.6), scores={5: 0.2, 10: 0.3, 15: 0.6})
    ending = "; stopped after step 15 of 40: score 0.6 reached target_score 0.6"
    assert next_action(early).action == plan.Promote(
        "p@3", "live", f" (step 15), the best of 3 scores with 0.6{ending}"
    )
    refused = next_action(replace(early, goal=replace(early.goal, at_least=0.9))).action
    assert isinstance(refused, plan.Complete)
    assert refused.outcome.endswith(ending)


def test_open_rollouts_are_dropped_when_no_step_will_use_them() -> None:
    goal = Goal("grpo", 40, staleness=2, max_tokens=10)
    now = Situation(goal, done=1, tokens=10, records={2: "open", 3: "committed"})
    assert next_action(now).action == plan.DropRollouts()
    dropped = replace(now, records={3: "committed"})
    assert next_action(dropped).action == plan.Export(1)
    assert next_action(replace(now, working="update")).action == plan.Wait(), "the step in hand is finished"
    assert next_action(replace(now, done=0, records={1: "committed"})).action == plan.Update(1, export=True)


@pytest.mark.parametrize("method", ["sft", "grpo"])
@pytest.mark.parametrize("done", [10, 40])
def test_ten_skipped_steps_in_a_row_end_the_run(method: str, done: int) -> None:
    now = replace(Situation(GOAL, done=done), goal=replace(GOAL, method=method))
    assert not isinstance(next_action(replace(now, skipped=9)).action, plan.Fail)
    action = next_action(replace(now, skipped=10)).action
    assert isinstance(action, plan.Fail)
    assert action.reason.startswith(f"10 optimizer steps in a row were skipped, up to step {done}: ")
    assert ("every group had equal rewards" in action.reason) == (method == "grpo")


@pytest.mark.parametrize(("per_record", "limit"), [(1, 10), (5, 10), (6, 12), (10, 20)])
def test_two_records_must_be_skipped_whatever_steps_each_gets(per_record: int, limit: int) -> None:
    goal = Goal("grpo", 40 * per_record, minibatches=1, steps_per_record=per_record)
    now = Situation(goal, done=2 * per_record + 10)
    assert not isinstance(next_action(replace(now, skipped=limit - 1)).action, plan.Fail)
    action = next_action(replace(now, skipped=limit)).action
    assert isinstance(action, plan.Fail)
    assert action.reason.startswith(f"{limit} optimizer steps in a row were skipped")
