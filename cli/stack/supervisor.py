"""`mint up` and `mint down`: bring a data directory's stack to the state where all parts are ready, and
stop exactly what was started.

In: the data directory, its stack file. Out: processes and the stack file. Invariant: every process that
is started is in the stack file before the next one starts, so that a killed `mint up` leaks nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cli.errors import CliError
from cli.stack import bases, launch, ports
from cli.stack.datadir import locked, open_data_dir
from cli.stack.file import Process, Stack, identify, read_stack, write_stack
from cli.stack.part import Part
from cli.stack.provision import provision
from cli.stack.services import service_names, service_parts
from cli.stack.stores import nats_part, s3_part

POLL_S = 0.2


class Reporter(Protocol):
    """Where progress is shown."""

    def note(self, text: str) -> None: ...

    def waiting(self, parts: dict[str, str]) -> None:
        """What is not ready yet, each with what it waits for; empty = done."""
        ...


@dataclass(frozen=True)
class Options:
    engine: str | None = None
    bases: Path | None = None
    free_ports: bool = False
    timeout_s: float = 600.0


def up(data: Path, options: Options, report: Reporter, watch: bool = False) -> Stack:
    """Start what is dead, wait until all is ready. Raises CliError; what was started stays for `down`."""
    data = data.resolve()
    with locked(data):
        for old, new in open_data_dir(data):
            report.note(f"data directory migrated from format {old} to {new}")
        bases.prepare(data, options.bases, report.note)
        stack = _plan(data, options, report)
        if watch:
            stack.supervisor = identify(os.getpid())
        write_stack(data, stack)
        stores, services = parts_of(data, stack)
        deadline = time.monotonic() + options.timeout_s
        _start(data, stack, stores, report)
        _wait(data, stack, stores, deadline, report)
        provision(data, stack, deadline)
        _start(data, stack, services, report)
        _wait(data, stack, services, deadline, report)
    return stack


def down(data: Path, report: Reporter, now: bool = False) -> list[str]:
    """Stop what `up` started: a foreground `mint up` first, then services, then the stores.

    `now` kills the object store instead of waiting for its slow goodbye; nothing acknowledged is lost.
    Returns the names of the parts that were alive."""
    data = data.resolve()
    stack = read_stack(data)
    if stack is None:
        return []
    if stack.supervisor is not None and stack.supervisor.alive and stack.supervisor.pid != os.getpid():
        report.note(f"stopping the mint up that watches this stack (pid {stack.supervisor.pid})")
        launch.stop([(stack.supervisor, 60.0)])
        stack = read_stack(data) or stack
    with locked(data):
        return _stop_all(data, stack, report, now)


def parts_of(data: Path, stack: Stack) -> tuple[list[Part], list[Part]]:
    """The stores and the services, each in start order."""
    return (
        [nats_part(data, stack.ports), s3_part(data, stack.ports)],
        service_parts(data, stack.ports, stack.engine),
    )


def restart(data: Path, part: Part, report: Reporter) -> Process:
    """Start one dead part again, unless another `mint` did so in the meantime."""
    with locked(data):
        stack = read_stack(data)
        if stack is None:
            raise CliError(f"{data} has no stack file any more")
        _start(data, stack, [part], report)
        return stack.processes[part.name]


def _plan(data: Path, options: Options, report: Reporter) -> Stack:
    """The stack file to be: engine and ports, keeping the port of everything that is alive."""
    stack = read_stack(data) or Stack()
    stack.engine = options.engine or stack.engine
    alive = {name for name, process in stack.processes.items() if process.alive}
    keep = [port for port in stack.ports if port.split("_")[0] in alive]
    names = [*ports.STORE_PORTS, *service_names(data)]
    stack.ports = ports.choose(names, stack.ports, keep, report.note, options.free_ports)
    return stack


def _start(data: Path, stack: Stack, parts: Sequence[Part], report: Reporter) -> None:
    for part in parts:
        running = stack.processes.get(part.name)
        if running is not None and running.alive:
            if running.settings == part.settings:
                continue
            report.note(f"{part.name} runs with other settings; restarting it")
            launch.stop([(running, part.stop_s)])
        stack.processes[part.name] = launch.start(part, data)
        write_stack(data, stack)


def _wait(data: Path, stack: Stack, parts: Sequence[Part], deadline: float, report: Reporter) -> None:
    """Until every probe answers ready. Raises CliError for a part that ended or the time being over."""
    pending = {part.name: part for part in parts}
    while pending:
        launch.reap()
        reasons = {}
        for name, part in list(pending.items()):
            if not stack.processes[name].alive:
                report.waiting({})
                raise CliError(f"{name} ended while starting; {launch.describe_log(data, name)}")
            reason = part.probe()
            if reason is None:
                del pending[name]
            else:
                reasons[name] = reason
        report.waiting(reasons)
        if pending and time.monotonic() > deadline:
            name, reason = next(iter(reasons.items()))
            raise CliError(f"{name} is not ready in time ({reason}); {launch.describe_log(data, name)}")
        if pending:
            time.sleep(POLL_S)


def _stop_all(data: Path, stack: Stack, report: Reporter, now: bool) -> list[str]:
    stores, services = parts_of(data, stack)
    alive = [name for name, process in stack.processes.items() if process.alive]
    _stop_group(stack, services, report, {})
    _stop_group(stack, stores, report, {"s3": 0.0} if now else {})
    stack.processes, stack.supervisor = {}, None
    write_stack(data, stack)
    return alive


def _stop_group(stack: Stack, parts: Sequence[Part], report: Reporter, patience: dict[str, float]) -> None:
    live = [part for part in parts if part.name in stack.processes and stack.processes[part.name].alive]
    report.waiting({part.name: "stopping" for part in live})
    launch.stop([(stack.processes[part.name], patience.get(part.name, part.stop_s)) for part in live])
    report.waiting({})
