"""A run as it happens: its server-sent events become a progress bar with the reward or the loss.

A cut stream is continued behind the last event seen, since the journal is durable.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cli.errors import FAILED, UNREACHABLE, CliError
from cli.gateway import Gateway, run_path
from cli.terminal import err

RECONNECTS = 30
RECONNECT_S = 1.0


def run_events(gateway: Gateway, run_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(type, body) of each fact of the run, `mint.v1.` left off, until it is over."""
    after: str | None = None
    failures = 0
    while True:
        try:
            for event in gateway.events(f"{run_path(run_id)}/progress", after):
                failures = 0
                after = event.id or after
                if event.event == "end":
                    return
                entry = json.loads(event.data)
                yield str(entry["type"]).removeprefix("mint.v1."), entry["body"]
        except CliError as error:
            failures += 1
            if error.code != UNREACHABLE or failures > RECONNECTS:
                raise
        else:
            failures += 1
            if failures > RECONNECTS:
                raise CliError(f"the gateway keeps ending the events of run {run_id}; see mint run show {run_id}")
        time.sleep(RECONNECT_S)


def follow(gateway: Gateway, run_id: str, steps: int) -> dict[str, Any]:
    """Show the run to its end and return its final view. Raises CliError if it did not complete."""
    show = _bar if err.is_terminal else _lines
    show(run_events(gateway, run_id), steps)
    run: dict[str, Any] = gateway.get(run_path(run_id))
    if run["state"] != "completed":
        raise CliError(f"run {run_id} {run['state']}: {run['outcome']}", FAILED)
    return run


def describe(kind: str, body: dict[str, Any]) -> str | None:
    """One line for a person, or None for facts that repeat what another one says."""
    describer = _DESCRIBE.get(kind)
    if describer is not None:
        return describer(body)
    if kind.startswith("run."):
        return str(body.get("outcome") or kind.removeprefix("run."))
    return None


def _rollout(body: dict[str, Any]) -> str:
    return f"step {body['step']}: reward {body['reward_mean']:.3f} over {body['trajectories']} samples"


def _updated(body: dict[str, Any]) -> str:
    loss = body.get("metrics", {}).get("loss")
    return f"step {body['step']}: " + (
        "skipped" if body.get("skipped") else f"loss {loss:.4f}" if loss is not None else "done"
    )


def _evaluated(body: dict[str, Any]) -> str:
    return f"{body.get('revision') or 'base'} scores {body['score']:.3f} on {body['items']} held-out items"


_DESCRIBE: dict[str, Callable[[dict[str, Any]], str]] = {
    "rollout.completed": _rollout,
    "policy.updated": _updated,
    "revision.registered": lambda body: f"revision {body['revision']} is in the catalog",
    "revision.evaluated": _evaluated,
    "alias.moved": lambda body: f"{body['policy']}:{body['alias']} → {body['revision']} ({body['reason']})",
}


def _lines(events: Iterator[tuple[str, dict[str, Any]]], steps: int) -> None:
    for kind, body in events:
        text = describe(kind, body)
        if text is not None:
            err.print(text, markup=False)


def _bar(events: Iterator[tuple[str, dict[str, Any]]], steps: int) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[signal]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=False) as progress:
        task = progress.add_task("queued", total=steps, signal="")
        for kind, body in events:
            _advance(progress, task, kind, body)


def _advance(progress: Progress, task: Any, kind: str, body: dict[str, Any]) -> None:
    if kind == "policy.updated":
        loss = body.get("metrics", {}).get("loss")
        signal = progress.tasks[0].fields["signal"]
        if loss is not None and not signal.startswith("reward"):
            signal = f"loss {loss:.4f}"
        progress.update(task, completed=body["step"], signal=signal)
    elif kind == "rollout.completed":
        progress.update(task, signal=f"reward {body['reward_mean']:.3f}")
    elif kind.startswith("run."):
        progress.update(task, description=kind.removeprefix("run."))
    elif kind in ("revision.evaluated", "alias.moved"):
        progress.console.print(describe(kind, body) or "", markup=False)
