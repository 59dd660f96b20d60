"""The main job on vLLM and SmolLM2, with few steps: the same path as `make demo`, without its scores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mint_schemas import TrainRequested
from mint_schemas.training import Gate

from cli.demo import job as steps
from cli.demo.ask import ask
from cli.demo.job import Job
from cli.demo.plan import Plan, grpo_request, sft_request
from tests.stacks import StackProcess

pytest.importorskip("vllm")

PLAN = Plan(sft_steps=4, grpo_steps=2, prompts=4, group_size=4, items=24, timeout_s=240)


@pytest.fixture(scope="module")
def vllm_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackProcess]:
    found = StackProcess(tmp_path_factory.mktemp("vllm-stack") / "data", "vllm")
    try:
        yield found.up()
    finally:
        found.down()


def _ungated(request: TrainRequested) -> TrainRequested:
    """So few steps prove nothing about scores, so that no gate may hang on them."""
    assert request.evaluation is not None
    return request.model_copy(update={"evaluation": request.evaluation.model_copy(update={"gate": Gate(at_least=0.0)})})


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_the_main_job_on_vllm(vllm_stack: StackProcess) -> None:
    job = Job(PLAN, vllm_stack.data)
    steps.stack_is_up(job)
    first = steps.train_run(job, _ungated(sft_request(PLAN)), "vllm-sft")
    second = steps.train_run(job, _ungated(grpo_request(PLAN)), "vllm-grpo")
    assert (first.revision, second.revision) == ("acme/adder@1", "acme/adder@3")
    job.report = vllm_stack.mint_json("report", *job.run_ids)
    steps.check_lineage(job, job.report["runs"][1])
    trained = ask(job.url, PLAN.policy, steps.QUESTIONS, 8)
    plain = ask(job.url, PLAN.base, steps.QUESTIONS[:2], 24)
    steps.check_names(job, trained, plain)
    assert [answer.text for answer in trained[:2]] != [answer.text for answer in plain]
    steps.roll_back_and_forward(job)
    assert [check for check in job.checks.made if not check.held] == []
