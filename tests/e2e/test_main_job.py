"""The main job on the tiny base: SFT, GRPO on own data, the openai client, rollback, the audit trail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mint_schemas import TrainRequested

from cli.demo import job as steps
from cli.demo.ask import ask
from cli.demo.job import Job
from cli.demo.plan import Plan
from tests.stacks import LETTERS, StackProcess, write_prompts
from tests.tiny import TINY_NAME, TINY_TOKEN

PLAN = Plan(policy="acme/tiny", base=TINY_NAME, token=TINY_TOKEN, grpo_steps=3, timeout_s=120)


def test_train_serve_roll_back(shared_stack: StackProcess, tmp_path: Path) -> None:
    job = Job(PLAN, shared_stack.data)
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    data = shared_stack.mint_json("data", "put", str(prompts), "--tenant", "acme")
    steps.stack_is_up(job)
    first = steps.train_run(job, _sft(data), "tiny-sft")
    second = steps.train_run(job, _grpo(data), "tiny-grpo")
    assert (first.revision, first.promoted) == ("acme/tiny@1", True)
    assert (second.revision, second.promoted) == ("acme/tiny@4", True)

    report = shared_stack.mint_json("report", *job.run_ids)
    job.report = report
    steps.check_lineage(job, report["runs"][1])
    trained = ask(job.url, PLAN.policy, steps.QUESTIONS[:2], 8)
    plain = ask(job.url, PLAN.base, steps.QUESTIONS[:2], 8)
    steps.check_names(job, trained, plain)
    steps.roll_back_and_forward(job)
    assert [check for check in job.checks.made if not check.held] == []

    scored = {score["revision"] for score in report["scores"]}
    assert scored == {"acme/tiny@1", "acme/tiny@4"}
    assert report["adapter"]["base_bytes"] > report["adapter"]["bytes"] > 0
    assert all(step["reward"] is not None for step in report["runs"][1]["steps"])


def test_publishing_a_request_twice_is_one_run(shared_stack: StackProcess) -> None:
    job = Job(PLAN, shared_stack.data)
    steps.stack_is_up(job)
    request = _request("acme/twice", {"kind": "sft", "steps": 1, "batch_size": 4, "data": _sums()})
    answers = [steps.train_run(job, request, "twice") for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(shared_stack.mint_json("runs", "--policy", "acme/twice")) == 1


def test_a_request_that_cannot_be_is_answered_on_the_bus(shared_stack: StackProcess) -> None:
    """An unknown base, sent to a known one's subject, fails with a reason and leaves no run alive."""
    job = Job(PLAN, shared_stack.data)
    steps.stack_is_up(job)
    request = _request("acme/lost", {"kind": "sft", "steps": 1, "data": _sums()}, base="no/such-base")
    ended = steps.train_run(job, request, "lost")
    assert ended.state == "failed"
    assert TINY_NAME in ended.outcome
    assert shared_stack.mint_json("runs", "--state", "running") == []


def _request(policy: str, method: dict[str, Any], base: str = TINY_NAME, **more: Any) -> TrainRequested:
    return TrainRequested.model_validate_json(json.dumps({"policy": policy, "base": base, "method": method, **more}))


def _sft(data: dict[str, Any]) -> TrainRequested:
    method = {"kind": "sft", "steps": 2, "batch_size": 4, "data": _sums()}
    return _request(PLAN.policy, method, evaluation=_evaluation(data))


def _grpo(data: dict[str, Any]) -> TrainRequested:
    method = {
        "kind": "grpo",
        "steps": PLAN.grpo_steps,
        "task": _letters(data),
        "prompts_per_step": 4,
        "group_size": 4,
        "max_tokens": 4,
    }
    return _request(PLAN.policy, method, evaluation=_evaluation(data))


def _sums() -> dict[str, Any]:
    return {"kind": "task", "task": {"kind": "arithmetic"}}


def _letters(data: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "jsonl", "data": data, "reward": LETTERS}


def _evaluation(data: dict[str, Any]) -> dict[str, Any]:
    """A gate that a random model passes at any score."""
    return {"task": _letters(data), "items": 8, "max_tokens": 4, "gate": {"at_least": -1.0}}
