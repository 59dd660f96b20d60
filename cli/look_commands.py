"""`mint run show`, `watch`, `plot`, `metrics` and `mint rollouts`: what a run did, from its committed facts."""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.errors import BAD_INPUT, CliError
from cli.follow import describe, follow
from cli.gateway import run_path
from cli.options import Data, Json, Limit, Url, connect
from cli.report.draw import draw
from cli.report.history import history, load_history
from cli.report.samples import print_samples
from cli.terminal import out, show

FACTS_SHOWN = 12


def run_show(
    run_id: str,
    facts: Annotated[bool, typer.Option("--facts", help=f"Every fact so far, not the last {FACTS_SHOWN}.")] = False,
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """One run: what was asked, where it is, its curves, time per stage, and its facts."""
    with connect(url, data) as gateway:
        run = gateway.get(run_path(run_id))
        run["journal"] = gateway.get(f"{run_path(run_id)}/journal")
    show(run, json, lambda it: _print_run(it, facts))


def run_watch(run_id: str, url: Url = None, data: Data = None, json: Json = False) -> None:
    """Watch a run to its end."""
    with connect(url, data) as gateway:
        run = follow(gateway, run_id, gateway.get(run_path(run_id))["steps"])
    show(run, json, lambda it: out.print(f"run {it['run_id']} {it['state']} {it['outcome']}", markup=False))


def run_plot(
    run_ids: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs, several to compare.")],
    to: Annotated[Path | None, typer.Option("--out", help="PNG file (default: run-ID.png here).")] = None,
    url: Url = None,
    data: Data = None,
) -> None:
    """Reward, scores, loss, distance, lengths, gradient and time per stage as a PNG."""
    with connect(url, data) as gateway:
        found = [load_history(gateway, run_id) for run_id in dict.fromkeys(run_ids)]
    # matplotlib takes a second to import, and only this command draws with it.
    from cli.report.panels import plot_runs

    path = to or Path(f"run-{run_ids[0][:8]}.png")
    try:
        drawn = plot_runs(found, path)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror or error}", BAD_INPUT) from error
    if not drawn:
        raise CliError(f"run {', '.join(run_ids)} has no committed step yet, so there is nothing to plot")
    out.print(f"wrote {path}", markup=False)


def run_metrics(
    run_id: str,
    to: Annotated[Path | None, typer.Option("--out", help="File (default: standard output).")] = None,
    url: Url = None,
    data: Data = None,
) -> None:
    """One JSON object a line per optimizer step.

    Fields: run_id, step, committed (false: sampled for, not yet made), skipped, metrics (loss, grad_norm,
    learning_rate, … as in policy.updated), rollout (null, or record_step, reward_mean, groups, trajectories,
    tokens, revision), revision and score (of what the step made, or null), seconds (rollout, update, export,
    evaluation; a record's rollout counts with its first step).
    """
    with connect(url, data) as gateway:
        steps = load_history(gateway, run_id).steps
    lines = "".join(json_text.dumps(step, ensure_ascii=False) + "\n" for step in steps)
    if to is None:
        sys.stdout.write(lines)
        return
    try:
        to.write_text(lines, encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {to}: {error.strerror or error}", BAD_INPUT) from error
    out.print(f"wrote {len(steps)} steps to {to}", markup=False)


def rollouts(
    run_id: Annotated[str, typer.Argument(metavar="RUN")],
    step: Annotated[int, typer.Option("--step", min=1, help="The optimizer step whose samples to show.")],
    worst: Annotated[bool, typer.Option("--worst", help="Lowest reward first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Highest reward first.")] = False,
    limit: Limit = 10,
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Prompts, completions, rewards, advantages and lengths of what a step learned from."""
    if worst and best:
        raise CliError("--worst and --best exclude each other", BAD_INPUT)
    order = "worst" if worst else "best" if best else "sampled"
    page: dict[str, Any] = {}
    with connect(url, data) as gateway:
        items: list[dict[str, Any]] = []
        cursor = None
        while len(items) < limit:
            path, size = f"{run_path(run_id)}/rollouts/{step}", min(limit - len(items), 100)
            page = gateway.get(path, order=order, limit=size, cursor=cursor)
            items.extend(page["items"])
            cursor = page["next_cursor"]
            if cursor is None:
                break
    show({**page, "items": items}, json, print_samples)


def _print_run(run: dict[str, Any], all_facts: bool) -> None:
    trace = (run.get("traceparent") or "").split("-")
    for label, value in (
        ("run", run["run_id"]),
        ("policy", run["policy"]),
        ("base", run["base"]),
        ("method", run.get("method")),
        ("state", f"{run['state']} (step {run['step']} of {run['steps']})"),
        ("outcome", run["outcome"] or None),
        ("revision", run["revision"]),
        ("asked", f"{run['request_source']} {run['request_id']}"),
        ("trace", trace[1] if len(trace) > 1 else None),
    ):
        if value is not None:
            out.print(f"{label:9} {value}", markup=False)
    draw(history(run, run["journal"]))
    said = [(entry, describe(entry["type"].removeprefix("mint.v1."), entry["body"])) for entry in run["journal"]]
    facts = [f"{entry['at'][:19]}  {text}" for entry, text in said if text is not None]
    hidden = 0 if all_facts else max(0, len(facts) - FACTS_SHOWN)
    out.print()
    if hidden:
        out.print(f"… {hidden} earlier facts; --facts shows them", markup=False)
    for fact in facts[hidden:]:
        out.print(fact, markup=False)
