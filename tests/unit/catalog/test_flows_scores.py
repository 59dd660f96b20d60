"""Whole runs that are scored on the way: what is promoted, and what ends them early."""

from __future__ import annotations

from typing import Any

import pytest
from mint_schemas.commands import EvaluationRequested
from mint_schemas.events import RunEnded

from services.catalog import commands, leases
from services.catalog.goal import Goal
from services.catalog.situation import needs_scores
from services.catalog.tables import AliasRow, CommandRow, EvaluationRow, JournalRow, OutboxRow, RevisionRow
from services.catalog.views import run_view
from shared.catalog.api import LeaseRequest
from tests.catalog_flows import counts_tokens, dpo, finish_choosing, opened, skips, updates, with_method, work_on
from tests.catalog_kit import Lab, evaluation, grpo, sft

ADDER = "acme/adder"


def _scores(lab: Lab, *scores: float) -> None:
    """Of revisions 1, 2, 3 …; the base has 0."""
    lab.worker.score = lambda revision: scores[int(revision.rsplit("@", 1)[1]) - 1] if revision else 0.0


def _ended(lab: Lab) -> RunEnded:
    return RunEnded.model_validate(lab.rows(OutboxRow)[-1].body)


@pytest.mark.parametrize("make", [sft, dpo])
def test_revisions_are_scored_before_the_training_goes_on(lab: Lab, make: Any) -> None:
    run_id = lab.request(make(steps=5, evaluation=evaluation(), eval_every=2))
    assert lab.finish(run_id) == [
        "update:1", "update:2", "export:2", "evaluation:2",
        "update:3", "update:4", "export:4", "evaluation:4",
        "update:5", "export:5", "evaluation:last",
    ]  # fmt: skip
    states = [row.type for row in lab.rows(JournalRow) if row.type.startswith("mint.v1.run.")]
    assert [state.removeprefix("mint.v1.run.") for state in states] == [
        "queued", "running", "evaluating", "promoting", "completed",
    ]  # fmt: skip
    body = lab.body(f"{run_id}:evaluation:4")
    assert isinstance(body, EvaluationRequested)
    assert (body.revision, body.items) == (f"{ADDER}@2", 16)
    assert [update.export for update in updates(lab, run_id)] == [False, True, False, True, True]
    assert lab.run(run_id).outcome == f"promoted: {ADDER}:live is {ADDER}@3"


def test_a_last_step_that_would_be_scored_on_the_way_is_scored_once(lab: Lab) -> None:
    run_id = lab.request(grpo(steps=4, evaluation=evaluation(), eval_every=2))
    assert [name for name in lab.finish(run_id) if name.startswith("evaluation")] == ["evaluation:2", "evaluation:last"]
    assert [row.revision for row in lab.rows(EvaluationRow)] == [f"{ADDER}@2", f"{ADDER}@4"]


def test_the_next_rollout_waits_for_the_score(lab: Lab) -> None:
    run_id = lab.request(grpo(steps=4, evaluation=evaluation(), eval_every=2))
    for _ in range(6):
        lab.work(run_id)
    assert opened(lab, run_id) == ["evaluation:2"]
    stale = lab.request(with_method(grpo("acme/other", steps=4, evaluation=evaluation(), eval_every=1), staleness=1))
    for name in ("rollout:1", "rollout:2", "update:1", "export:1"):
        work_on(lab, stale, name)
    assert opened(lab, stale) == ["evaluation:1", "rollout:3"], "beside it, as far as the staleness allows"


def test_best_promotes_the_best_revision_and_the_end_names_it(lab: Lab) -> None:
    _scores(lab, 0.3, 0.8, 0.5)
    run_id = lab.request(sft(steps=6, evaluation=evaluation(at_least=0.7), eval_every=2, promote="best"))
    lab.finish(run_id)
    run = lab.run(run_id)
    assert run.outcome == f"promoted: {ADDER}:live is {ADDER}@2 (step 4), the best of 3 scores with 0.8"
    assert [row.revision for row in lab.rows(AliasRow)] == [f"{ADDER}@2"]
    assert (_ended(lab).revision, _ended(lab).score, _ended(lab).promoted) == (f"{ADDER}@2", 0.8, True)
    assert lab.database.read_now(lambda s: run_view(s, lab.run(run_id))).revision == f"{ADDER}@2"
    following = lab.request(sft(steps=1))
    assert lab.run(following).parent == f"{ADDER}@2"


def test_of_two_equal_scores_the_later_is_promoted(lab: Lab) -> None:
    _scores(lab, 0.8, 0.8, 0.5)
    lab.finish(lab.request(sft(steps=6, evaluation=evaluation(), eval_every=2, promote="best")))
    assert [row.revision for row in lab.rows(AliasRow)] == [f"{ADDER}@2"]


def test_the_gate_refuses_the_best_revision_too(lab: Lab) -> None:
    _scores(lab, 0.3, 0.6, 0.5)
    run_id = lab.request(sft(steps=6, evaluation=evaluation(at_least=0.7), eval_every=2, promote="best"))
    lab.finish(run_id)
    assert lab.run(run_id).state == "completed"
    expected = f"not promoted: score 0.6 of {ADDER}@2 (the best of 3 scores) is below at_least 0.7"
    assert lab.run(run_id).outcome == expected
    assert (_ended(lab).revision, _ended(lab).score, _ended(lab).promoted) == (f"{ADDER}@2", 0.6, False)


def test_the_best_revision_is_made_ready_again_before_it_is_promoted(lab: Lab) -> None:
    _scores(lab, 0.8, 0.5, 0.5)
    run_id = lab.request(sft(steps=6, evaluation=evaluation(), eval_every=2, promote="best"))
    while f"{run_id}:evaluation:last" != lab.open(run_id):
        lab.work(run_id)
    lab.unready = {f"{ADDER}@1"}
    lab.work(run_id)
    assert (lab.run(run_id).state, lab.run(run_id).waiting_for) == ("promoting", f"{ADDER}@1")
    lab.unready.clear()
    lab.advance(run_id)
    assert [row.revision for row in lab.rows(AliasRow)] == [f"{ADDER}@1"]


def test_a_target_score_ends_the_training_as_if_the_last_step_had_come(lab: Lab) -> None:
    _scores(lab, 0.3, 0.9)
    body = sft(steps=100, evaluation=evaluation(), eval_every=3, stop_when={"target_score": 0.9})
    run_id = lab.request(body)
    assert lab.finish(run_id)[-2:] == ["export:6", "evaluation:6"], "it was scored already"
    assert lab.run(run_id).outcome == (
        f"promoted: {ADDER}:live is {ADDER}@2; stopped after step 6 of 100: score 0.9 reached target_score 0.9"
    )
    assert (lab.run(run_id).state, _ended(lab).score) == ("completed", 0.9)
    assert opened(lab, run_id) == []


def test_no_progress_ends_the_training_and_best_goes_back(lab: Lab) -> None:
    _scores(lab, 0.3, 0.5, 0.4, 0.5, 0.45)
    body = grpo(steps=100, evaluation=evaluation(), eval_every=2, promote="best", stop_when={"no_progress_steps": 4})
    run_id = lab.request(body)
    lab.worker.score = lambda revision: {2: 0.3, 4: 0.5, 6: 0.4, 8: 0.5}[int((revision or "@0").rsplit("@", 1)[1])]
    assert lab.finish(run_id)[-1] == "evaluation:8"
    outcome = lab.run(run_id).outcome
    assert outcome.startswith(f"promoted: {ADDER}:live is {ADDER}@8 (step 8), the best of 4 scores with 0.5; ")
    assert "stopped after step 8 of 100: no evaluation in 4 steps was above the 0.5 of step 4" in outcome


@pytest.mark.parametrize(("staleness", "last", "tokens"), [(0, 3, 420), (2, 2, 480)])
def test_a_token_budget_counts_what_is_sampled_and_trained_on(lab: Lab, staleness: int, last: int, tokens: int) -> None:
    """100 tokens a rollout and 40 an update: 420 are there with the third update, or with the fourth rollout
    where rollouts run ahead; the update that is open then is finished."""
    lab.worker.change = counts_tokens(40.0)
    body = with_method(grpo(steps=50, evaluation=evaluation(), stop_when={"max_tokens": 420}), staleness=staleness)
    run_id = lab.request(body)
    done = finish_choosing(lab, run_id, min)
    assert done[-2:] == [f"export:{last}", "evaluation:last"]
    assert [row.step for row in lab.rows(RevisionRow)] == list(range(1, last + 1))
    said = f"; stopped after step {last} of 50: {tokens} tokens were sampled and trained on, max_tokens is 420"
    assert lab.run(run_id).outcome.endswith(said)
    assert all(row.state != "open" for row in lab.rows(CommandRow))


def test_a_budget_that_ends_between_exports_makes_a_revision_of_its_step(lab: Lab) -> None:
    lab.worker.change = counts_tokens(40.0)
    run_id = lab.request(sft(steps=50, stop_when={"max_tokens": 100}))
    assert lab.finish(run_id) == ["update:1", "update:2", "update:3", "export:3"]
    assert lab.run(run_id).outcome == (
        f"promoted: {ADDER}:live is {ADDER}@1; "
        "stopped after step 3 of 50: 120 tokens were sampled and trained on, max_tokens is 100"
    )
    assert all(update.export for update in updates(lab, run_id)), "a probe is recorded, whichever is the last"


def test_rollouts_that_no_step_will_use_are_dropped(lab: Lab) -> None:
    run_id = lab.request(with_method(grpo(steps=50, stop_when={"max_tokens": 200}), staleness=2))
    work_on(lab, run_id, "rollout:1")
    held = lab.take(f"{run_id}:rollout:3").epoch
    work_on(lab, run_id, "rollout:2")
    assert sorted(opened(lab, run_id)) == ["rollout:3", "update:1"]
    work_on(lab, run_id, "update:1")
    assert opened(lab, run_id) == ["export:1"]
    assert getattr(lab.commit(f"{run_id}:rollout:3", held), "code", "") == "wrong_step"
    dropped = lab.take(f"{run_id}:rollout:3", "w2")
    assert (dropped.status, dropped.reason.split(":")[0]) == ("closed", "superseded")
    request = LeaseRequest(command_id=f"{run_id}:rollout:3", worker="w1", epoch=held)
    renewed = lab.database.write_now(leases.renew, request, lab.rules, lab.clock())
    assert (renewed.held, renewed.cancelled) == (False, True), "it is over, not lost to another worker"
    lab.finish(run_id)
    assert lab.run(run_id).state == "completed"


def test_ten_skipped_steps_in_a_row_fail_the_run_and_keep_its_revisions(lab: Lab) -> None:
    lab.worker.change = skips(lambda step: step > 2)
    run_id = lab.request(grpo(steps=50))
    assert lab.finish(run_id)[-1] == "update:12"
    run = lab.run(run_id)
    assert run.state == "failed"
    assert run.outcome.startswith("10 optimizer steps in a row were skipped, up to step 12: every group had equal")
    assert len(lab.rows(RevisionRow)) == 11
    assert lab.rows(AliasRow) == []


def test_one_bad_record_of_ten_steps_ends_no_run_two_do(lab: Lab) -> None:
    lab.worker.change = skips(lambda step: step <= 10)
    run_id = lab.request(with_method(grpo(steps=20), epochs=5, minibatches=2))
    lab.finish(run_id)
    assert lab.run(run_id).state == "completed"
    lab.worker.change = skips(lambda step: True)
    run_id = lab.request(with_method(grpo("acme/other", steps=50), epochs=5, minibatches=2))
    assert lab.finish(run_id)[-1] == "update:20"
    assert lab.run(run_id).outcome.startswith("20 optimizer steps in a row were skipped, up to step 20: ")


@pytest.mark.parametrize(
    ("goal", "done", "needed"),
    [
        (Goal("grpo", 9), 8, False),
        (Goal("grpo", 9), 9, True),
        (Goal("grpo", 9, eval_every=3), 2, True),
        (Goal("sft", 9, max_tokens=10), 2, True),
    ],
)
def test_scores_are_looked_up_where_they_decide_something(goal: Goal, done: int, needed: bool) -> None:
    assert needs_scores(goal, done) is needed


def test_a_step_that_learns_breaks_a_row_of_skipped_ones(lab: Lab) -> None:
    lab.worker.change = skips(lambda step: step % 10 != 0)
    run_id = lab.request(grpo(steps=25))
    lab.finish(run_id, 400)
    assert lab.run(run_id).state == "completed"


def test_a_restart_in_the_middle_of_an_evaluation_goes_on_with_it(lab: Lab) -> None:
    run_id = lab.request(sft(steps=4, evaluation=evaluation(), eval_every=2))
    for _ in range(3):
        lab.work(run_id)
    command_id = f"{run_id}:evaluation:2"
    lab.take(command_id)
    lab.clock.now += 1000
    assert lab.database.write_now(commands.reissue_silent, lab.clock(), 120.0) == [command_id]
    lab.advance(run_id)
    assert opened(lab, run_id) == ["evaluation:2"]
    assert lab.finish(run_id)[0] == "evaluation:2"
    assert lab.run(run_id).state == "completed"
