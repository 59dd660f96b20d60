"""What `mint status` says: each part's state now, and where to reach the stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cli.stack.file import Stack, read_stack
from cli.stack.part import Part
from cli.stack.supervisor import parts_of


def status(data: Path) -> dict[str, Any]:
    """`{"running", "data", "gateway": {"url"}, "nats": {"url"}, "s3": {"url"}, "services": {name: {...}}}`.

    A state is `ready`, `starting`, `dead` (was started, is over) or `stopped`; `detail` says what a part
    waits for."""
    data = data.resolve()
    stack = read_stack(data)
    if stack is None or not stack.ports:
        return {"running": False, "data": str(data), "services": {}}
    stores, services = parts_of(data, stack)
    states = {part.name: _state(part, stack) for part in (*stores, *services)}
    return {
        "running": any(state["pid"] is not None for state in states.values()),
        "healthy": all(state["state"] == "ready" for state in states.values()),
        "data": str(data),
        "engine": stack.engine,
        "gateway": {"url": stack.url("gateway")},
        "nats": {"url": stack.url("nats", "nats")},
        "s3": {"url": stack.url("s3")},
        "services": states,
    }


def _state(part: Part, stack: Stack) -> dict[str, Any]:
    process = stack.processes.get(part.name)
    if process is None:
        return {"state": "stopped", "pid": None, "port": stack.ports[part.name], "detail": ""}
    if not process.alive:
        return {"state": "dead", "pid": None, "port": stack.ports[part.name], "detail": f"pid {process.pid} is over"}
    reason = part.probe()
    return {
        "state": "ready" if reason is None else "starting",
        "pid": process.pid,
        "port": stack.ports[part.name],
        "detail": reason or "",
    }
