"""Starting and stopping processes of the stack.

Each part is the leader of its own session, so that Ctrl-C in the terminal reaches `mint` alone, which
then stops the parts in order. Only a process whose pid and start time are in the stack file is stopped.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from cli.errors import CliError
from cli.stack.file import Process, identify
from cli.stack.part import Part

LOG_TAIL_LINES = 8


def log_path(data: Path, name: str) -> Path:
    return data / "logs" / f"{name}.log"


def start(part: Part, data: Path) -> Process:
    """Raises CliError with the end of the log if the process is over at once."""
    log = log_path(data, part.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    for path, text in part.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text)
    with log.open("ab") as output:
        child = subprocess.Popen(
            part.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **part.env},
            cwd=data,
            start_new_session=True,
        )
    _CHILDREN.append(child)
    try:
        return identify(child.pid, part.settings)
    except psutil.NoSuchProcess as error:
        raise CliError(f"{part.name} ended at once; {describe_log(data, part.name)}") from error


_CHILDREN: list[subprocess.Popen[bytes]] = []


def reap() -> None:
    """Collect ended children of this very process, which would stay zombies otherwise."""
    _CHILDREN[:] = [child for child in _CHILDREN if child.poll() is None]


def describe_log(data: Path, name: str) -> str:
    """Where the part's log is and how it ends."""
    log = log_path(data, name)
    try:
        lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except FileNotFoundError:
        lines = []
    tail = "".join(f"\n    {line[:300]}" for line in lines)
    return f"its log {log} ends with:{tail}" if lines else f"its log {log} is empty"


def run_step(command: tuple[str, ...], env: dict[str, str], data: Path, name: str) -> None:
    """Run one short program of the set-up to its end. Raises CliError with the end of its log."""
    log = log_path(data, name)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            cwd=data,
            check=False,
        )
    if done.returncode != 0:
        raise CliError(f"{name} failed with exit code {done.returncode}; {describe_log(data, name)}")


def stop(processes: Iterable[tuple[Process, float]]) -> None:
    """SIGTERM to all at once, then wait for each its own time; what is left then is killed."""
    live = [(handle, patience) for process, patience in processes if (handle := process.handle()) is not None]
    begun = time.monotonic()
    for handle, _ in live:
        _signal(handle, kill=False)
    for handle, patience in live:
        if not _ended(handle, begun + patience):
            _signal(handle, kill=True)
            _ended(handle, time.monotonic() + 5.0)
    reap()


def _signal(handle: psutil.Process, kill: bool) -> None:
    try:
        if kill:
            handle.kill()
        else:
            handle.terminate()
    except psutil.NoSuchProcess:
        return


def _is_gone_zombie(handle: psutil.Process) -> bool:
    """A process shows as a zombie as soon as its first thread ended; it holds its ports until the last did."""
    return handle.status() == psutil.STATUS_ZOMBIE and handle.num_threads() <= 1


def _ended(handle: psutil.Process, deadline: float) -> bool:
    while True:
        reap()
        try:
            if not handle.is_running() or _is_gone_zombie(handle):
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
