"""`mint train`, `runs`, `run show`, `cancel`: asking for a better policy and watching what comes of it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.follow import describe, follow
from cli.gateway import Gateway, run_path
from cli.options import Data, Json, Limit, Url, connect
from cli.spec import read_spec
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


def run_show(run_id: str, url: Url = None, data: Data = None, json: Json = False) -> None:
    """One run: what was asked, where it is, each fact so far."""
    with connect(url, data) as gateway:
        run = gateway.get(run_path(run_id))
        run["journal"] = gateway.get(f"{run_path(run_id)}/journal")
    show(run, json, _print_run)


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


def _validate(gateway: Gateway, request: dict[str, Any], json: bool) -> None:
    answer = gateway.post("/mint/v1/runs", {**request, "dry_run": True})
    show(answer, json, lambda it: out.print(f"valid: {it['policy']} on {it['base']}", markup=False))


def _print_run(run: dict[str, Any]) -> None:
    trace = (run.get("traceparent") or "").split("-")
    for label, value in (
        ("run", run["run_id"]),
        ("policy", run["policy"]),
        ("base", run["base"]),
        ("state", f"{run['state']} (step {run['step']} of {run['steps']})"),
        ("outcome", run["outcome"] or None),
        ("revision", run["revision"]),
        ("asked", f"{run['request_source']} {run['request_id']}"),
        ("trace", trace[1] if len(trace) > 1 else None),
    ):
        if value is not None:
            out.print(f"{label:9} {value}", markup=False)
    for entry in run["journal"]:
        text = describe(entry["type"].removeprefix("mint.v1."), entry["body"])
        if text is not None:
            out.print(f"{entry['at'][:19]}  {text}", markup=False)
