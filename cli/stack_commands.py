"""`mint up`, `down`, `status` and `base add`: the commands that work on a data directory."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.errors import CliError
from cli.options import Data, Json, data_dir
from cli.stack import bases, supervisor
from cli.stack.datadir import open_data_dir
from cli.stack.status import status as stack_status
from cli.stack.watch import watch
from cli.terminal import TerminalReporter, err, out, print_table, show


class Engine(StrEnum):
    auto = "auto"
    vllm = "vllm"
    transformers = "transformers"


def up(
    data: Data = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when all is ready; mint down stops it.")] = False,
    engine: Annotated[Engine | None, typer.Option(help="Inference engine (default: as before, else auto).")] = None,
    bases_file: Annotated[Path | None, typer.Option("--bases", help="Base models to serve, as bases.json.")] = None,
    free_ports: Annotated[bool, typer.Option("--free-ports", help="Take free ports, not the usual ones.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait until all is ready.")] = 600.0,
) -> None:
    """Start the stack, or what of it is dead, and wait until all of it is ready."""
    directory = data_dir(data)
    report = TerminalReporter()
    options = supervisor.Options(engine.value if engine else None, bases_file, free_ports, timeout)
    try:
        stack = supervisor.up(directory, options, report, watch=not detach)
    except KeyboardInterrupt:
        report.waiting({})
        _stopped(directory, report)
        raise CliError("interrupted while starting; what had been started is stopped") from None
    out.print(f"MinT is ready: {stack.url('gateway')} (data in {directory}, engine {stack.engine})", markup=False)
    if not detach:
        err.print("Ctrl-C stops it.")
        try:
            watch(directory, report)
        finally:
            _stopped(directory, report)


def down(
    data: Data = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the object store's slow goodbye.")] = False,
) -> None:
    """Stop what mint up started in this data directory, and only that."""
    stopped = supervisor.down(data_dir(data), TerminalReporter(), now)
    out.print(f"stopped {', '.join(stopped)}" if stopped else "nothing was running", markup=False)


def status(data: Data = None, json: Json = False) -> None:
    """Each part's state and pid, and where to reach the stack. Exits 1 unless all is ready."""
    found = stack_status(data_dir(data))
    show(found, json, _print_status)
    if not found.get("healthy"):
        raise typer.Exit(1)


def base_add(
    path: Annotated[Path, typer.Argument(help="Directory with config.json, tokenizer.json and *.safetensors.")],
    name: Annotated[str, typer.Option(help="Public name, such as its Hugging Face id.")],
    token: Annotated[str, typer.Option(help="Short unique name on the bus: a-z, 0-9 and '-'.")],
    max_rank: Annotated[int, typer.Option(min=1, max=512, help="Highest LoRA rank to train and serve.")] = 32,
    data: Data = None,
    json: Json = False,
) -> None:
    """Add a base model of your own; the next mint up serves it."""
    directory = data_dir(data)
    open_data_dir(directory)
    added = bases.add(directory, path, name, token, max_rank)
    found = {"name": added.name, "token": added.token, "directory": str(added.directory), "sha256": added.sha256}
    show(found, json, lambda it: out.print(f"{it['name']} is added; run mint up to serve it", markup=False))


def _stopped(directory: Path, report: TerminalReporter) -> None:
    report.note("stopping the stack")
    supervisor.down(directory, report)


def _print_status(found: dict[str, Any]) -> None:
    if not found["services"]:
        out.print(f"no stack in {found['data']}; start one with mint up", markup=False)
        return
    rows = [
        (name, part["state"], part["pid"], part["port"], part["detail"]) for name, part in found["services"].items()
    ]
    print_table(("part", "state", "pid", "port", ""), rows)
    out.print(
        f"gateway {found['gateway']['url']}   nats {found['nats']['url']}   s3 {found['s3']['url']}", markup=False
    )
