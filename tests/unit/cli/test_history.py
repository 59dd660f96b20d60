"""A run step by step: what each field of `mint run metrics` says, and that nothing is invented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.errors import CliError
from cli.look_commands import run_metrics
from cli.report.history import history
from tests.unit.cli.journals import Recorded, recorded


def test_a_step_has_its_metrics_record_revision_score_and_seconds() -> None:
    run, journal = recorded("grpo", steps=8, per_record=2, skipped=(3,), score_every=4)
    found = history(run, journal)
    steps = found.steps
    assert [step["step"] for step in steps] == list(range(1, 9))
    third, fourth = steps[2], steps[3]
    assert third["skipped"]
    assert third["metrics"]["kept_groups"] == 0.0
    assert "loss" not in third["metrics"]
    # Both steps of one record name it; its seconds count once, with the first.
    assert third["rollout"]["record_step"] == fourth["rollout"]["record_step"] == 3
    assert third["rollout"]["trajectories"] == 96
    assert third["rollout"]["revision"] == "acme/adder@2"
    assert {"rollout", "update"} == set(third["seconds"])
    assert {"update", "export", "evaluation"} == set(fourth["seconds"])
    assert (third["revision"], fourth["revision"]) == (None, "acme/adder@4")
    assert third["score"] is None
    assert [step for step, _ in found.rewards()] == [1, 3, 5, 7]
    assert [step for step, _ in found.rewards(each_step=True)] == list(range(1, 9))
    assert fourth["score"] == pytest.approx(0.46, abs=0.05)


def test_a_record_that_no_step_used_yet_is_an_uncommitted_step() -> None:
    run, journal = recorded("grpo", steps=2)
    cut = [entry for entry in journal if entry["body"].get("step") != 2 or "rollout" in entry["type"]]
    last = history(run, cut).steps[-1]
    assert (last["step"], last["committed"], last["metrics"]) == (2, False, {})
    assert last["rollout"]["record_step"] == 2


def test_scores_of_the_start_and_of_the_runs_own_revisions_are_apart() -> None:
    found = history(*recorded("sft", steps=8, score_every=4))
    assert found.baseline == 0.11
    assert [step for step, _ in found.scores] == [4, 8]
    assert found.rewards() == []


def test_waiting_is_what_no_stage_accounts_for() -> None:
    run, journal = recorded("sft", steps=4)
    seconds = history(run, journal).seconds
    spent = sum(value for name, value in seconds.items() if name != "waiting and loading")
    assert seconds["waiting and loading"] == pytest.approx(0.4 * len(journal))
    # Stages that overlap can take longer than the clock; there is no negative waiting.
    assert history(run | {"ended_at": run["started_at"]}, journal).seconds["waiting and loading"] == 0.0
    assert spent > 0


def test_a_run_that_was_refused_has_no_steps() -> None:
    run = {"run_id": "r", "policy": None, "method": None, "request": {"base": 3}, "started_at": None, "ended_at": None}
    entry = {"seq": 1, "at": "2026-01-01T00:00:00+00:00", "type": "mint.v1.run.failed", "body": {"outcome": "no"}}
    found = history(run, [entry])
    assert (found.steps, found.scores, found.seconds) == ([], [], {})


def test_values_that_are_no_numbers_are_not_drawn() -> None:
    run, journal = recorded("sft", steps=3)
    journal[2]["body"]["metrics"]["loss"] = float("nan")
    assert len(history(run, journal).metric("loss")) == 2


def test_metrics_are_one_json_object_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, journal = recorded("dpo", steps=5)
    monkeypatch.setattr("cli.look_commands.connect", lambda url, data: Recorded((run, journal)))
    run_metrics(run["run_id"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert set(lines[0]) == {
        *("run_id", "step", "committed", "skipped", "metrics"),
        *("rollout", "revision", "score", "seconds"),
    }
    assert all(name in str(run_metrics.__doc__) for name in lines[0])
    assert lines[-1]["metrics"]["margin"] > 1
    run_metrics(run["run_id"], tmp_path / "steps.jsonl")
    assert [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == lines
    with pytest.raises(CliError, match="cannot write"):
        run_metrics(run["run_id"], tmp_path / "no" / "steps.jsonl")
