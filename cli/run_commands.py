"""`mint train`, `runs`, `cancel`, `evaluate`: asking for a better policy, taking it back, scoring one."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from mint_schemas import TrainRequested
from mint_schemas.training import Dpo, Grpo, Sft, Task

from cli.follow import follow
from cli.gateway import Gateway, run_path
from cli.options import Data, Json, Limit, Url, connect
from cli.spec import read_object, read_spec
from cli.terminal import out, print_table, show


def train(
    spec: Annotated[str, typer.Argument(help="The request: a JSON or TOML file, or - for JSON on standard input.")],
    follow_run: Annotated[bool, typer.Option("--follow", help="Watch the run to its end.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate everything, run nothing.")] = False,
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Ask for a better policy."""
    request = read_spec(spec)
    with connect(url, data) as gateway:
        if dry_run:
            _validate(gateway, request, json)
            return
        run = gateway.post("/mint/v1/runs", request)
        if follow_run:
            run = follow(gateway, run["run_id"], request["method"]["steps"])
        show(
            run, json, lambda it: out.print(f"run {it['run_id']} {it['state']} {it.get('outcome') or ''}", markup=False)
        )


def runs(
    policy: Annotated[str | None, typer.Option(help="Only this policy's.")] = None,
    state: Annotated[str | None, typer.Option(help="Only runs in this state.")] = None,
    limit: Limit = 20,
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """The runs, latest first."""
    with connect(url, data) as gateway:
        found = gateway.pages("/mint/v1/runs", limit, policy=policy, state=state)
    rows = [
        (run["run_id"], run["policy"], run["method"], run["state"], f"{run['step']}/{run['steps']}", run["outcome"])
        for run in found
    ]
    show(found, json, lambda _: print_table(("run", "policy", "method", "state", "step", "outcome"), rows))


def cancel(
    run_id: str,
    reason: Annotated[str, typer.Option(help="Recorded with the run.")] = "cancelled by request",
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """End a run within one step; the policy's earlier revisions stay as they are."""
    with connect(url, data) as gateway:
        run = gateway.post(f"{run_path(run_id)}/cancel", {"reason": reason})
    show(run, json, lambda it: out.print(f"run {it['run_id']} {it['state']}: {it['outcome']}", markup=False))


def evaluate(
    revision: Annotated[
        str, typer.Argument(metavar="REVISION", help="tenant/policy@N, or tenant/policy for its live.")
    ],
    task: Annotated[str, typer.Argument(help="What it is scored on: a JSON or TOML file, or - for standard input.")],
    items: Annotated[int, typer.Option(help="Held-out items.", min=1)] = 256,
    max_tokens: Annotated[int, typer.Option(help="Of an answer.", min=1)] = 64,
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Score a revision on a task, and wait for the score."""
    asked = {"revision": revision, "task": read_object(task, "a task"), "items": items, "max_tokens": max_tokens}
    with connect(url, data) as gateway:
        run = gateway.post("/mint/v1/evaluations", asked)
        done = follow(gateway, run["run_id"], 0)
    show(done, json, lambda it: out.print(it["outcome"], markup=False))


def _validate(gateway: Gateway, request: dict[str, Any], json: bool) -> None:
    answer = gateway.post("/mint/v1/runs", {**request, "dry_run": True})
    show(answer, json, lambda it: out.print(f"valid: {it['policy']} on {it['base']}: {_plan(request)}", markup=False))


def _plan(request: dict[str, Any]) -> str:
    """What would run, in words: the method, its steps and what they learn from."""
    method = TrainRequested.model_validate(request).method
    match method:
        case Grpo():
            rows = f"{method.prompts_per_step} prompts × {method.group_size} samples a record"
            rows += f", {method.steps_per_record} steps a record" if method.steps_per_record > 1 else ""
            source = f"{rows}, task {_task(method.task)}"
        case Dpo():
            source = f"{method.batch_size} pairs a step"
        case Sft():
            rows = f"{method.batch_size} chats a step"
            source = f"{rows}, task {_task(method.data.task)}" if method.data.kind == "task" else rows
    return f"{method.kind}, {method.steps} steps, {source}"


def _task(task: Task) -> str:
    return f"{task.kind} {task.name}" if task.kind == "reasoning_gym" else task.kind
