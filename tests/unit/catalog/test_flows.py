"""Whole runs through the catalog's transactions: what is asked, in which order, and how they end."""

from __future__ import annotations

import pytest
from mint_schemas.commands import EvaluationRequested, RolloutRequested, UpdateRequested
from mint_schemas.events import RunEnded

from services.catalog import aliases, runs
from services.catalog.tables import (
    AliasMoveRow,
    AliasRow,
    CheckpointRow,
    CommandRow,
    EvaluationRow,
    JournalRow,
    OutboxRow,
    RevisionRow,
)
from tests.catalog_kit import Lab, evaluation, grpo, sft


def test_sft_updates_then_exports_once_and_promotes(lab: Lab) -> None:
    run_id = lab.request(sft(steps=3))
    assert lab.finish(run_id) == ["update:1", "update:2", "update:3", "export:3"]
    run = lab.run(run_id)
    assert (run.state, run.outcome, run.promoted) == ("completed", "promoted: acme/adder:live is acme/adder@1", True)
    assert [row.revision for row in lab.rows(RevisionRow)] == ["acme/adder@1"]


def test_sft_exports_every_save_every(lab: Lab) -> None:
    body = sft(steps=5)
    body["method"]["save_every"] = 2
    assert lab.finish(lab.request(body)) == [
        "update:1", "update:2", "export:2", "update:3", "update:4", "export:4", "update:5", "export:5",
    ]  # fmt: skip
    assert [(row.step, row.parent) for row in lab.rows(RevisionRow)] == [
        (2, None), (4, "acme/adder@1"), (5, "acme/adder@2"),
    ]  # fmt: skip


def test_grpo_samples_each_step_with_the_revision_before_it(lab: Lab) -> None:
    """ART#661: after step k the rollout of step k + 1 names revision k."""
    run_id = lab.request(grpo(steps=3))
    assert lab.finish(run_id) == [f"{kind}:{step}" for step in (1, 2, 3) for kind in ("rollout", "update", "export")]
    bodies = [lab.body(row.command_id) for row in lab.rows(CommandRow)]
    rollouts = [body for body in bodies if isinstance(body, RolloutRequested)]
    assert [body.revision for body in sorted(rollouts, key=lambda b: b.step)] == [None, "acme/adder@1", "acme/adder@2"]
    digests = {row.revision: row.adapter_sha256 for row in lab.rows(RevisionRow)}
    assert all(body.adapter_sha256 == (digests[body.revision] if body.revision else None) for body in rollouts)


def test_updates_continue_the_committed_checkpoint(lab: Lab) -> None:
    first = lab.request(sft(steps=2))
    lab.finish(first)
    second = lab.request(grpo(steps=2))
    lab.finish(second)
    one, two = (lab.body(f"{second}:update:{step}") for step in (1, 2))
    assert isinstance(one, UpdateRequested)
    assert isinstance(two, UpdateRequested)
    assert lab.run(second).parent == "acme/adder@1"
    assert one.start is not None
    assert one.fresh_optimizer
    assert one.start.files["adapter.safetensors"].key.startswith(f"attempts/{first}/update-2/")
    assert "optimizer.safetensors" not in one.start.files
    assert two.start is not None
    assert not two.fresh_optimizer
    assert two.start.files["optimizer.safetensors"].key.startswith(f"attempts/{second}/update-1/")
    assert one.record is not None
    assert one.seed == two.seed


@pytest.mark.parametrize(("first", "second", "same"), [(7, 7, True), (7, 8, False), (0, 0, True), (None, None, False)])
def test_a_named_seed_makes_a_request_repeatable(lab: Lab, first: int | None, second: int | None, same: bool) -> None:
    seeds = []
    for policy, seed in (("acme/one", first), ("acme/two", second)):
        run_id = lab.request(grpo(policy, steps=1, **({} if seed is None else {"seed": seed})))
        lab.finish(run_id)
        bodies = [lab.body(f"{run_id}:{kind}:1") for kind in ("rollout", "update")]
        seeds.append([body.seed for body in bodies if isinstance(body, RolloutRequested | UpdateRequested)])
    assert [len(found) for found in seeds] == [2, 2]
    assert (seeds[0] == seeds[1]) is same
    assert seeds[0][0] != seeds[0][1]


def test_a_fresh_policy_starts_without_a_checkpoint(lab: Lab) -> None:
    body = lab.body(f"{lab.request(sft())}:update:1")
    assert isinstance(body, UpdateRequested)
    assert (body.start, body.fresh_optimizer) == (None, True)


def test_gate_asks_for_the_parents_score_first_and_only_once(lab: Lab) -> None:
    lab.finish(lab.request(sft()))
    lab.worker.score = lambda revision: {"acme/adder@1": 0.4}.get(revision or "", 0.6)
    request = sft(steps=1, evaluation=evaluation(no_worse_than="parent"))
    second = lab.request(request)
    assert lab.finish(second) == ["update:1", "export:1", "evaluation:parent", "evaluation:last"]
    third = lab.request(request)
    assert lab.finish(third) == ["update:1", "export:1", "evaluation:last"], "the parent's score exists"
    assert [row.revision for row in lab.rows(EvaluationRow)] == ["acme/adder@1", "acme/adder@2", "acme/adder@3"]


def test_without_a_parent_the_gate_compares_with_the_base(lab: Lab) -> None:
    lab.worker.score = lambda revision: 0.7 if revision is None else 0.2
    run_id = lab.request(sft(evaluation=evaluation(no_worse_than="parent")))
    assert lab.finish(run_id)[-2:] == ["evaluation:base", "evaluation:last"]
    assert lab.run(run_id).outcome == "not promoted: score 0.2 is below the base model's 0.7"
    assert lab.run(run_id).state == "completed"
    assert lab.rows(AliasRow) == []


def test_gate_failure_completes_unpromoted(lab: Lab) -> None:
    lab.worker.score = lambda revision: 0.31
    run_id = lab.request(sft(evaluation=evaluation(at_least=0.5)))
    lab.finish(run_id)
    run = lab.run(run_id)
    assert (run.state, run.outcome) == ("completed", "not promoted: score 0.31 is below at_least 0.5")


def test_alias_moved_meanwhile_completes_unpromoted(lab: Lab) -> None:
    lab.finish(lab.request(sft()))
    lab.finish(lab.request(sft(promote_to=None)))
    run_id = lab.request(sft())
    move = aliases.Move("acme/adder", "live", "acme/adder@2", "ann", "manual")
    lab.database.write_now(aliases.move, move, "tiny-llama", lab.clock())
    lab.finish(run_id)
    run = lab.run(run_id)
    assert run.state == "completed"
    assert run.outcome == "not promoted: alias moved by ann (manual to acme/adder@2, version 2)"
    assert not run.promoted


def test_one_active_run_per_policy_the_rest_in_order(lab: Lab) -> None:
    first, second, third = (lab.request(sft(steps=1)) for _ in range(3))
    other = lab.request(sft("acme/other", steps=1))
    states = [lab.run(run_id).state for run_id in (first, second, third, other)]
    assert states == ["running", "queued", "queued", "running"]
    assert lab.open(second) is None
    lab.finish(first)
    assert [lab.run(run_id).state for run_id in (second, third)] == ["running", "queued"]
    lab.advance(second)
    lab.finish(second)
    assert lab.run(second).parent == "acme/adder@1", "what live points at when the run becomes active"


def test_publishing_a_request_twice_is_one_run(lab: Lab) -> None:
    assert lab.request(sft(), id="same") == lab.request(sft(), id="same")
    assert len(lab.rows(CommandRow)) == 1
    assert [row.type for row in lab.rows(OutboxRow)].count("mint.v1.run.queued") == 1


def test_advancing_again_and_again_changes_nothing(lab: Lab) -> None:
    run_id = lab.request(grpo(steps=2))
    while lab.open(run_id) is not None:
        before = (len(lab.rows(OutboxRow)), len(lab.rows(CommandRow)), len(lab.rows(RevisionRow)))
        lab.advance(run_id)
        assert (len(lab.rows(OutboxRow)), len(lab.rows(CommandRow)), len(lab.rows(RevisionRow))) == before
        lab.work(run_id)


def test_cancel_closes_the_command_and_starts_the_next_run(lab: Lab) -> None:
    first, second = lab.request(sft()), lab.request(sft())
    command_id = lab.open(first)
    assert command_id is not None
    taken = lab.take(command_id)
    lab.database.write_now(lambda s: runs.end(s, runs.find(s, first), "cancelled", "enough", lab.bases, lab.clock()))
    answer = lab.commit(command_id, taken.epoch)
    assert getattr(answer, "code", None) == "run_ended"
    assert lab.take(command_id).status == "closed"
    assert lab.run(second).state == "running"
    assert lab.rows(CheckpointRow) == []


@pytest.mark.parametrize("failed", [True, False])
def test_a_revision_that_cannot_load_fails_the_run_with_its_reason(lab: Lab, failed: bool) -> None:
    """aibrix#1860: never 'running' on an adapter that was never loaded."""
    lab.unready.add("acme/adder@1")
    run_id = lab.request(grpo(steps=2))
    assert lab.finish(run_id)[-1] == "export:1"
    assert (lab.run(run_id).state, lab.run(run_id).waiting_for) == ("running", "acme/adder@1")
    if failed:
        lab.failed["acme/adder@1"] = "0 of 14 modules applied (replica r1)"
    else:
        lab.clock.now += 901
    lab.advance(run_id)
    run = lab.run(run_id)
    assert (run.state, run.waiting_for) == ("failed", None), "what is over is not looked at again"
    assert ("0 of 14 modules applied" if failed else "ready on 0 of 1") in run.outcome


def test_waiting_for_readiness_ends_when_it_comes(lab: Lab) -> None:
    lab.unready.add("acme/adder@1")
    run_id = lab.request(grpo(steps=2))
    lab.finish(run_id)
    lab.clock.now += 100
    lab.unready.clear()
    lab.advance(run_id)
    assert lab.open(run_id) == f"{run_id}:rollout:2"
    assert lab.run(run_id).waiting_for is None


def test_the_journal_tells_a_run_in_order_and_once(lab: Lab) -> None:
    run_id = lab.request(sft(steps=1, evaluation=evaluation()))
    lab.finish(run_id)
    told = [row.type.removeprefix("mint.v1.") for row in lab.rows(JournalRow)]
    assert told == [
        "run.queued", "run.running", "policy.updated", "revision.exported", "revision.registered", "run.evaluating",
        "revision.evaluated", "run.promoting", "alias.moved", "run.completed",
    ]  # fmt: skip


def test_the_end_answers_the_request(lab: Lab) -> None:
    run_id = lab.request(sft(steps=1, evaluation=evaluation()), id="order-7", source="shop")
    lab.finish(run_id)
    last = lab.rows(OutboxRow)[-1]
    ended = RunEnded.model_validate(last.body)
    assert last.type == "mint.v1.run.completed"
    assert (ended.request_source, ended.request_id) == ("shop", "order-7")
    assert (ended.revision, ended.promoted, ended.score) == ("acme/adder@1", True, 0.5)


def test_every_message_of_a_run_is_in_its_trace(lab: Lab) -> None:
    run_id = lab.request(sft(steps=1))
    lab.finish(run_id)
    trace = lab.run(run_id).traceparent.split("-")[1]
    assert {row.traceparent.split("-")[1] for row in lab.rows(OutboxRow)} == {trace}
    assert "mint.v1.alias.moved" in {row.type for row in lab.rows(OutboxRow)}


def test_moving_back_and_forth_is_three_facts(lab: Lab) -> None:
    lab.finish(lab.request(sft()))
    lab.finish(lab.request(sft()))
    for revision in ("acme/adder@1", "acme/adder@2"):
        move = aliases.Move("acme/adder", "live", revision, "ann", "rollback")
        lab.database.write_now(aliases.move, move, "tiny-llama", lab.clock())
    moves = [row.ce_id for row in lab.rows(OutboxRow) if row.type == "mint.v1.alias.moved"]
    assert moves == [f"acme/adder:live:{version}" for version in (1, 2, 3, 4)]
    assert [row.previous for row in lab.rows(AliasMoveRow)] == [None, "acme/adder@1", "acme/adder@2", "acme/adder@1"]


def test_evaluation_bodies_name_what_is_scored(lab: Lab) -> None:
    run_id = lab.request(sft(steps=1, evaluation=evaluation()))
    lab.finish(run_id)
    body = lab.body(f"{run_id}:evaluation:last")
    assert isinstance(body, EvaluationRequested)
    assert (body.revision, body.items) == ("acme/adder@1", 16)
    assert body.adapter_sha256 == lab.rows(RevisionRow)[0].adapter_sha256
