"""A run as it happens: its server-sent events become a progress bar with what the run is about.

A cut stream is continued behind the last event seen, since the journal is durable.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cli.errors import FAILED, UNREACHABLE, CliError
from cli.gateway import Gateway, run_path
from cli.terminal import err

RECONNECTS = 30
RECONNECT_S = 1.0
SPEED_WINDOW_S = 600.0
"""What the time left is estimated from; a step may take minutes."""


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
    metrics = body.get("metrics", {})
    figures = [text for name in ("loss", "margin", "accuracy") if (text := _figure(name, metrics.get(name)))]
    return f"step {body['step']}: " + ("skipped" if body.get("skipped") else ", ".join(figures) or "done")


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
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[signal]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=False, speed_estimate_period=SPEED_WINDOW_S) as progress:
        task = progress.add_task("queued", total=steps, signal="")
        signals: dict[str, str] = {}
        for kind, body in events:
            _advance(progress, task, signals, kind, body)


def _advance(progress: Progress, task: Any, signals: dict[str, str], kind: str, body: dict[str, Any]) -> None:
    if kind == "policy.updated":
        signals.pop("skipped", None)
    signals.update(signals_of(kind, body))
    progress.update(task, signal=" · ".join(signals.values()))
    if kind == "policy.updated":
        progress.update(task, completed=body["step"])
    elif kind.startswith("run."):
        progress.update(task, description=kind.removeprefix("run."))
    elif kind in ("revision.evaluated", "alias.moved"):
        progress.console.print(describe(kind, body) or "", markup=False)


def signals_of(kind: str, body: dict[str, Any]) -> dict[str, str]:
    """The figures that a fact says, by name: the newest of each is what the bar shows."""
    metrics = body.get("metrics", {}) if kind == "policy.updated" else {}
    if kind == "policy.updated" and body.get("skipped"):
        return {"skipped": f"step {body['step']} skipped"}
    values = {
        "reward": body.get("reward_mean") if kind == "rollout.completed" else None,
        "loss": metrics.get("loss"),
        "margin": metrics.get("margin"),
        "score": body.get("score") if kind == "revision.evaluated" else None,
    }
    return {name: text for name, value in values.items() if (text := _figure(name, value))}


def _figure(name: str, value: float | None) -> str | None:
    if value is None or not math.isfinite(value):
        return None
    return f"{name} {value:.0%}" if name == "accuracy" else f"{name} {value:.{4 if name == 'loss' else 3}f}"
