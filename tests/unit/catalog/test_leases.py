"""Take, renew, release, commit: one writer, fenced by epoch, by the catalog's clock."""

from __future__ import annotations

import math
from typing import Any

import pytest

from services.catalog import commands, leases, runs
from services.catalog.tables import CheckpointRow, CommandRow, FileRow, JournalRow, OutboxRow
from shared.catalog.api import CommitAnswer, EvaluationResult, ExportResult, LeaseRequest, RolloutResult, UpdateResult
from tests.catalog_kit import Lab, evaluation, grpo, sft


def _open(lab: Lab, body: dict[str, Any] | None = None) -> tuple[str, str]:
    run_id = lab.request(body or sft())
    command_id = lab.open(run_id)
    assert command_id is not None
    return run_id, command_id


def _release(lab: Lab, command_id: str, epoch: int, failure: str = "") -> None:
    request = LeaseRequest(command_id=command_id, worker="w1", epoch=epoch, failure=failure)
    lab.database.write_now(leases.release, request, lab.clock())


def _renew(lab: Lab, command_id: str, epoch: int, worker: str = "w1") -> Any:
    request = LeaseRequest(command_id=command_id, worker=worker, epoch=epoch)
    return lab.database.write_now(leases.renew, request, lab.rules, lab.clock())


def test_a_second_worker_is_told_when_to_come_back(lab: Lab) -> None:
    _, command_id = _open(lab)
    assert lab.take(command_id).epoch == 1
    lab.clock.now += 10
    answer = lab.take(command_id, "w2")
    assert (answer.status, answer.retry_after_s) == ("busy", 20.0)
    assert lab.take(command_id, "w1").status == "busy", "a redelivery to the same worker is no second right to work"


def test_renewal_keeps_a_lease_and_expiry_ends_it(lab: Lab) -> None:
    _, command_id = _open(lab)
    epoch = lab.take(command_id).epoch
    for _ in range(5):
        lab.clock.now += 20
        assert _renew(lab, command_id, epoch).held
    lab.clock.now += 31
    assert not _renew(lab, command_id, epoch).held
    assert lab.take(command_id, "w2").epoch == 2
    assert not _renew(lab, command_id, epoch).held


def test_a_stale_worker_commits_nothing(lab: Lab) -> None:
    """nats.go#1929: a heartbeat is not a fence; the epoch is."""
    _, command_id = _open(lab)
    old = lab.take(command_id).epoch
    lab.clock.now += 31
    assert getattr(lab.commit(command_id, old), "code", "") == "stale_epoch"
    new = lab.take(command_id, "w2").epoch
    assert getattr(lab.commit(command_id, old), "code", "") == "stale_epoch"
    assert getattr(lab.commit(command_id, old, "w2"), "code", "") == "stale_epoch"
    assert lab.rows(CheckpointRow) == []
    assert isinstance(lab.commit(command_id, new, "w2"), CommitAnswer)


def test_a_retried_commit_is_applied_once_and_answers_what_won(lab: Lab) -> None:
    """SkyRL#2035: the same command redelivered is one optimizer step."""
    _, command_id = _open(lab)
    epoch = lab.take(command_id).epoch
    first = lab.commit(command_id, epoch)
    again = lab.commit(command_id, epoch)
    assert first == again
    assert lab.take(command_id, "w2").event == getattr(first, "event", None)
    assert len(lab.rows(CheckpointRow)) == 1
    named = {row.key for row in lab.rows(FileRow)}
    assert all("/a1/" in key for key in named), "only the attempt that won has named files"
    assert sum(row.type == "mint.v1.policy.updated" for row in lab.rows(JournalRow)) == 1


def test_five_takes_without_a_commit_exhaust_a_command(lab: Lab) -> None:
    _, command_id = _open(lab)
    for _ in range(5):
        assert lab.take(command_id).status == "granted"
        lab.clock.now += 31
    answer = lab.take(command_id)
    assert answer.status == "exhausted"
    assert "update of step 1 was taken 5 times without a commit" in answer.reason


def test_a_shutdown_gives_the_take_back_a_failure_does_not(lab: Lab) -> None:
    _, command_id = _open(lab)
    for _ in range(8):
        _release(lab, command_id, lab.take(command_id).epoch)
    for _ in range(5):
        _release(lab, command_id, lab.take(command_id).epoch, "out of memory")
    answer = lab.take(command_id)
    assert answer.status == "exhausted"
    assert "out of memory" in answer.reason


def test_releasing_a_lost_lease_changes_nothing(lab: Lab) -> None:
    _, command_id = _open(lab)
    old = lab.take(command_id).epoch
    lab.clock.now += 31
    new = lab.take(command_id, "w2").epoch
    _release(lab, command_id, old)
    assert _renew(lab, command_id, new, "w2").held


def test_renewal_tells_that_the_run_is_over(lab: Lab) -> None:
    run_id, command_id = _open(lab)
    epoch = lab.take(command_id).epoch
    lab.database.write_now(lambda s: runs.end(s, runs.find(s, run_id), "cancelled", "enough", lab.bases, 0.0))
    answer = _renew(lab, command_id, epoch)
    assert (answer.held, answer.cancelled) == (False, True)


def test_an_unknown_command_is_closed(lab: Lab) -> None:
    assert lab.take("nobody:update:1").status == "closed"


def test_a_silent_command_is_sent_again_ever_more_patiently(lab: Lab) -> None:
    _, command_id = _open(lab)

    def reissue() -> list[str]:
        return lab.database.write_now(commands.reissue_silent, lab.clock(), 120.0)

    assert reissue() == []
    lab.clock.now += 121
    assert reissue() == [command_id]
    lab.clock.now += 121
    assert reissue() == []
    lab.clock.now += 120
    assert reissue() == [command_id]
    assert [row.replay for row in lab.rows(OutboxRow) if row.ce_id == command_id] == [None, 1, 2]


def test_a_renewed_command_is_not_silent(lab: Lab) -> None:
    _, command_id = _open(lab)
    epoch = lab.take(command_id).epoch
    for _ in range(20):
        lab.clock.now += 20
        assert _renew(lab, command_id, epoch).held
    assert lab.database.write_now(commands.reissue_silent, lab.clock(), 120.0) == []


def _fails_with(lab: Lab, run_id: str) -> str:
    lab.finish(run_id)
    run = lab.run(run_id)
    assert run.state == "failed"
    return str(run.outcome)


def test_a_step_that_changed_nothing_fails_loudly(lab: Lab) -> None:
    def change(result: Any) -> Any:
        return result.model_copy(update={"adapter_changed": False}) if isinstance(result, UpdateResult) else result

    lab.worker.change = change
    assert "left the adapter's bytes unchanged" in _fails_with(lab, lab.request(sft()))


@pytest.mark.parametrize("metrics", [{"grad_norm": 0.0}, {"grad_norm": 1.0, "skipped": 1.0}])
def test_a_step_without_gradient_may_change_nothing(lab: Lab, metrics: dict[str, float]) -> None:
    def change(result: Any) -> Any:
        if not isinstance(result, UpdateResult):
            return result
        return result.model_copy(update={"adapter_changed": False, "metrics": metrics, "skipped": "skipped" in metrics})

    lab.worker.change = change
    run_id = lab.request(sft())
    lab.finish(run_id)
    assert lab.run(run_id).state == "completed"


def test_numbers_that_are_not_finite_fail_the_run(lab: Lab) -> None:
    def change(result: Any) -> Any:
        if isinstance(result, UpdateResult):
            return result.model_copy(update={"metrics": {"loss": math.nan}})
        return result

    lab.worker.change = change
    assert "loss=nan" in _fails_with(lab, lab.request(sft()))


def test_a_rollout_of_another_revision_fails_the_run(lab: Lab) -> None:
    """ART#661, verl#7495: stale sampling is an error, never a silent record."""

    def change(result: Any) -> Any:
        if isinstance(result, RolloutResult) and result.revision is not None:
            return result.model_copy(update={"revision": None, "adapter_sha256": None})
        return result

    lab.worker.change = change
    reason = _fails_with(lab, lab.request(grpo()))
    assert "step 2 was sampled with the base model, the step needs acme/adder@1" in reason


@pytest.mark.parametrize(
    ("field", "value"), [("adapter_sha256", "0" * 64), ("rank", 4), ("base_sha256", "1" * 64), ("step", 9)]
)
def test_an_export_of_something_else_fails_the_run(lab: Lab, field: str, value: object) -> None:
    def change(result: Any) -> Any:
        if isinstance(result, ExportResult):
            return result.model_copy(update={"content": result.content.model_copy(update={field: value})})
        return result

    lab.worker.change = change
    assert field in _fails_with(lab, lab.request(sft()))


def test_a_score_of_another_task_fails_the_run(lab: Lab) -> None:
    def change(result: Any) -> Any:
        return result.model_copy(update={"task_sha256": "2" * 64}) if isinstance(result, EvaluationResult) else result

    lab.worker.change = change
    assert "scored by (task, scorer)" in _fails_with(lab, lab.request(sft(evaluation=evaluation())))


def test_policies_are_written_by_one_worker_at_a_time(lab: Lab) -> None:
    _, command_id = _open(lab)
    row = next(row for row in lab.rows(CommandRow) if row.command_id == command_id)
    assert row.resource == "policy:acme/adder"
