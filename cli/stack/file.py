"""The stack file: which ports a data directory's stack uses and which processes `mint up` started.

A process is named by pid *and* start time, so that a pid that was given to somebody else is never taken
for ours.
"""

from __future__ import annotations

from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from cli.errors import CliError
from cli.stack.datadir import write_atomic

HOST = "127.0.0.1"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Process(BaseModel):
    """`settings` is a digest of the command and our variables: other settings need a restart."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: str
    settings: str = ""

    def handle(self) -> psutil.Process | None:
        """The live process, or None if it is over (a zombie is) or the pid is another's by now."""
        try:
            process = psutil.Process(self.pid)
            if _start_mark(process) != self.started:
                return None
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except psutil.NoSuchProcess:
            return None

    @property
    def alive(self) -> bool:
        return self.handle() is not None


class Stack(BaseModel):
    ports: dict[str, int] = {}
    engine: str = "auto"
    processes: dict[str, Process] = {}
    supervisor: Process | None = None
    """The foreground `mint up`, if one watches this stack."""

    def url(self, port: str, scheme: str = "http") -> str:
        return f"{scheme}://{HOST}:{self.ports[port]}"


def identify(pid: int, settings: str = "") -> Process:
    """Raises psutil.NoSuchProcess if it is over already."""
    return Process(pid=pid, started=_start_mark(psutil.Process(pid)), settings=settings)


def _start_mark(process: psutil.Process) -> str:
    """When it started, exactly: in clock ticks since a named boot, which no clock change moves."""
    if not _BOOT_ID.exists():
        return str(process.create_time())
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(process.pid) from error
    ticks = stat.rpartition(")")[2].split()[19]
    return f"{_BOOT_ID.read_text().strip()}/{ticks}"


def stack_path(data: Path) -> Path:
    return data / "stack.json"


def read_stack(data: Path) -> Stack | None:
    try:
        return Stack.model_validate_json(stack_path(data).read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise CliError(f"{stack_path(data)} cannot be read; move it away and run mint up ({error})") from error


def write_stack(data: Path, stack: Stack) -> None:
    write_atomic(stack_path(data), stack.model_dump_json(indent=2) + "\n")
