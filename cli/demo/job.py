"""The main job, step by step, with every check named.

In: a plan, a running stack's addresses. Out: checks and the report. Invariant: nothing here knows more
than a product system, a client of the gateway and a user of `mint` can know.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mint_schemas import RunEnded, TrainRequested
from mint_schemas.cloudevents import run_id_for

from cli.demo.ask import Answer, ask
from cli.demo.checks import Checks
from cli.demo.command import mint_json
from cli.demo.plan import Plan, grpo_request, sft_request
from cli.demo.product import train
from cli.follow import describe
from cli.gateway import Gateway
from cli.report.collect import collect
from cli.terminal import out

SOURCE = "acme/product"
SUMS = ((12, 34), (7, 8), (45, 23), (60, 18), (31, 57), (80, 9), (26, 26), (5, 71))
QUESTIONS = [f"What is {a}+{b}?" for a, b in SUMS]
PARTS = ("nats", "s3", "catalog", "gateway", "rollout", "learner", "exporter", "evaluator", "serving")


@dataclass
class Job:
    """One pass through the main job against the stack in `data`."""

    plan: Plan
    data: Path
    checks: Checks = field(default_factory=Checks)
    status: dict[str, Any] = field(default_factory=dict)
    run_ids: list[str] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return str(self.status["gateway"]["url"])

    def mint(self, *arguments: str) -> Any:
        return mint_json(*arguments, "--data", str(self.data))


def stack_is_up(job: Job) -> None:
    job.status = job.mint("status")
    parts = job.status["services"]
    pids = {parts[name]["pid"] for name in PARTS}
    ready = [name for name in PARTS if parts[name]["state"] == "ready"]
    job.checks.that("nats, s3 and seven services are ready", len(ready) == len(PARTS), ", ".join(ready))
    job.checks.that("each is a process of its own", len(pids) == len(PARTS) and None not in pids)


def train_sft(job: Job) -> None:
    ended = train_run(job, sft_request(job.plan), "adder-sft")
    job.checks.that("the SFT run completed and its revision is live", ended.promoted, ended.outcome)


def train_grpo(job: Job) -> None:
    ended = train_run(job, grpo_request(job.plan), "adder-grpo")
    job.checks.that("the GRPO run passed its gate and its revision is live", ended.promoted, ended.outcome)


def read_report(job: Job) -> None:
    """Collect the report and check what it must show."""
    with Gateway(job.url) as gateway:
        job.report = collect(gateway, job.run_ids)
    plan, checks = job.plan, job.checks
    sft, grpo = job.report["runs"]
    base, after_sft, after_grpo = (score_of(job.report, it) for it in (None, sft["revision"], grpo["revision"]))
    checks.that("the base scores about 0", base is not None and base < 0.1, _shown(base))
    checks.that(f"SFT scores above {plan.sft_score}", (after_sft or 0) > plan.sft_score, _shown(after_sft))
    gained = (after_grpo or 0) - (after_sft or 0)
    checks.that(f"GRPO adds at least {plan.gain}", gained >= plan.gain, f"{_shown(after_grpo)}, {gained:+.3f}")
    check_lineage(job, grpo)


def check_lineage(job: Job, grpo: dict[str, Any]) -> None:
    """Each step sampled with the revision of the step before; every revision is in the catalog."""
    links = {it["revision"]: it for it in job.report["lineage"]}
    own = {it["step"]: it for it in job.report["lineage"] if it["run_id"] == grpo["run_id"]}
    steps = grpo["steps"]
    job.checks.that(
        f"all {job.plan.grpo_steps} GRPO revisions are in the catalog",
        sorted(own) == list(range(1, job.plan.grpo_steps + 1)),
    )
    parent = own[1]["parent"] if 1 in own else None
    expected = [links.get(parent), *(own.get(step["step"]) for step in steps[:-1])]
    told = [
        before is not None
        and (step["sampled_by"], step["sampler_sha256"]) == (before["revision"], before["adapter_sha256"])
        for step, before in zip(steps, expected, strict=True)
    ]
    job.checks.that("each step sampled with the revision of the step before", len(told) > 0 and all(told))


def ask_policy_and_base(job: Job) -> None:
    policy, base = job.plan.policy, job.plan.base
    trained = ask(job.url, policy, QUESTIONS, 8)
    plain = ask(job.url, base, QUESTIONS, 24)
    for ours, theirs in zip(trained[:3], plain, strict=False):
        out.print(f"    {ours.question}  {policy}: {ours.text!r}  base: {theirs.text!r}", markup=False)
    right = sum(answer.text == str(a + b) for answer, (a, b) in zip(trained, SUMS, strict=True))
    numbers = sum(answer.text.isdecimal() for answer in trained)
    of = len(SUMS)
    job.checks.that(f"{policy} answers with bare numbers", numbers >= of - 1, f"{numbers} of {of}, {right} right")
    job.checks.that("the base answers in its own way", not any(answer.text.isdecimal() for answer in plain))
    check_names(job, trained, plain)


def check_names(job: Job, trained: list[Answer], plain: list[Answer]) -> None:
    live = job.report["runs"][-1]["revision"]
    digests = {it["revision"]: it["adapter_sha256"] for it in job.report["lineage"]}
    job.checks.that(
        f"its answers name {live} and the digest that the catalog holds",
        all((it.revision, it.adapter_sha256) == (live, digests.get(live)) for it in trained),
    )
    job.checks.that("model echoes the reference asked for", {it.model for it in trained} == {job.plan.policy})
    job.checks.that("the base's answers name no revision", all(it.revision is None for it in plain))


def roll_back_and_forward(job: Job) -> None:
    policy = job.plan.policy
    older, newer = job.report["runs"][0]["revision"], job.report["runs"][-1]["revision"]
    job.mint("rollback", policy)
    answer = ask(job.url, policy, QUESTIONS[:1], 8)[0]
    job.checks.that(
        "after mint rollback the next request runs on the older revision", answer.revision == older, answer.revision
    )
    job.mint("alias", policy, "live", newer)
    answer = ask(job.url, policy, QUESTIONS[:1], 8)[0]
    job.checks.that("after rolling forward it runs on the newer one", answer.revision == newer, answer.revision)
    with Gateway(job.url) as gateway:
        moves = gateway.get(f"/mint/v1/policies/{policy}/moves")
    for move in moves:
        was = f"{move['previous'] or 'nothing'} → {move['revision']}"
        out.print(
            f"    {move['at'][:19]} live v{move['version']}: {was} ({move['reason']}, {move['actor']})", markup=False
        )
    targets = [move["revision"] for move in sorted(moves, key=lambda it: it["version"])]
    job.checks.that("the audit trail has all four moves", targets == [older, newer, older, newer])


def score_of(report: dict[str, Any], revision: str | None) -> float | None:
    """The last score of a revision, None for the base's."""
    found = [it["score"] for it in report["scores"] if it["revision"] == revision]
    return float(found[-1]) if found else None


def train_run(job: Job, request: TrainRequested, event_id: str) -> RunEnded:
    """Publish a request and wait for its answer on the bus."""
    job.run_ids.append(run_id_for(SOURCE, event_id))
    nats_url = job.status["nats"]["url"]
    ended = asyncio.run(
        train(nats_url, job.plan.token, SOURCE, event_id, request, _tell, job.plan.timeout_s),
    )
    job.checks.that(
        f"{request.method.kind}: the bus answers run.completed to {SOURCE} {event_id}",
        ended.state == "completed",
        ended.outcome,
    )
    return ended


def _tell(kind: str, body: dict[str, Any]) -> None:
    text = describe(kind, body)
    if text is not None:
        out.print(f"    {text}", markup=False)


def _shown(score: float | None) -> str:
    return "no score" if score is None else f"{score:.3f}"
