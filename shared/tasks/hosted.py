"""Asking processes that the kernel bounds (`host.py`) from threads of this one.

In: an opening, which says what the processes are to be, and requests. Out: their answers. Invariants:
whatever the input, this process keeps its memory and its time, the wall clock's too; the children see
nothing of its environment, and end when it does, even killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.errors import Retryable
from shared.tasks.forks import FORBIDDEN
from shared.tasks.host import OPENING_CPU_S, REQUEST_CPU_S

__all__ = ["HostError", "Hosted"]

WALL_FACTOR = 10.0
"""Seconds by the clock for each second of CPU time that the work may take: the machine may be loaded."""

_HOST = Path(__file__).with_name("host.py")
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG")


class HostError(Exception):
    """The work raised, or took more than it may (`over`)."""

    def __init__(self, message: str, over: bool = False) -> None:
        super().__init__(message)
        self.over = over


class Hosted:
    """Safe from many threads: up to `children` work at once, further ones wait. `opened` is the answer
    to the opening."""

    def __init__(self, opening: dict[str, Any], children: int = 1) -> None:
        """Raises HostError when the opening is refused or takes too much, Retryable when no process starts."""
        self._opening = opening
        self._places = threading.BoundedSemaphore(children)
        self._idle = [_started(opening)]
        self.opened: dict[str, Any] = self._idle[0].opened

    def ask(self, request: Any) -> dict[str, Any]:
        """Raises HostError, and Retryable when what failed is the machine and not the work."""
        with self._places:
            child = self._child()
            try:
                answer = child.exchange(request, REQUEST_CPU_S)
            except _Ended:
                # Ended from outside, not by this request; a fresh child answers the same.
                child = _started(self._opening)
                try:
                    answer = child.exchange(request, REQUEST_CPU_S)
                except _Ended as error:
                    raise _retryable(error) from error
            self._idle.append(child)
        if "lost" in answer:
            raise _retryable(answer["lost"])
        if "error" in answer:
            raise HostError(answer["error"], over=answer.get("over", False))
        return answer

    def _child(self) -> _Child:
        try:
            return self._idle.pop()
        except IndexError:
            return _started(self._opening)


class _Ended(Exception):
    """The child was ended by something else than its bounds."""


def _started(opening: dict[str, Any]) -> _Child:
    try:
        return _Child(opening)
    except (_Ended, OSError) as error:
        raise _retryable(error) from error


def _retryable(reason: object) -> Retryable:
    return Retryable(f"a process that scores apart from the service failed: {reason}; see that memory is left")


class _Child:
    def __init__(self, opening: dict[str, Any]) -> None:
        self._kind: str = opening["kind"]
        # Sets of texts are ordered by their hash, and some generators draw from sets.
        environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        flags = ["-I", "-S"] if self._kind == "pattern" else ["-P", "-s"]
        self.process = subprocess.Popen(
            [sys.executable, *flags, str(_HOST)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _end, self.process)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._answers = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._requests, False)
        self.opened = self.exchange(opening, OPENING_CPU_S)
        if "error" in self.opened:
            raise HostError(self.opened["error"], over=self.opened.get("over", False))

    def exchange(self, value: Any, cpu_s: dict[str, float]) -> dict[str, Any]:
        """Raises HostError for work that is over its bounds, `_Ended` when the child was ended otherwise."""
        wall_s = WALL_FACTOR * cpu_s[self._kind]
        try:
            line = self._line(json.dumps(value).encode() + b"\n", time.monotonic() + wall_s)
        except TimeoutError as error:
            self._killed()
            raise HostError(f"it took more than {wall_s:g} s", over=True) from error
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            code = self._killed(grace_s=1.0)
            if code == -signal.SIGPROF:
                raise HostError(f"it took more than {cpu_s[self._kind]:g} s of CPU time", over=True)
            if code in (FORBIDDEN, -signal.SIGSYS):
                raise HostError("it tried to reach a file, a program, a connection or a process", over=True)
            if code == -signal.SIGALRM:
                raise HostError("it closed its answer and did not end", over=True)
            raise _Ended(f"it ended with {code}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _line(self, request: bytes, deadline: float) -> bytes:
        """The line that answers `request`; cut short when the child ends. Raises TimeoutError, BrokenPipeError."""
        rest, line = memoryview(request), b""
        ready = select.poll()
        ready.register(self._answers, select.POLLIN)
        ready.register(self._requests, select.POLLOUT)
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            events = dict(ready.poll(max(0.0, left) * 1000))
            if left <= 0 and not events:
                raise TimeoutError
            if self._requests in events:
                rest = rest[os.write(self._requests, rest) :]
                if not rest:
                    ready.unregister(self._requests)
            if self._answers in events:
                part = os.read(self._answers, 1 << 16)
                if not part:
                    return line
                line += part
        return line

    def _killed(self, grace_s: float = 0.0) -> int:
        """The exit code, its own where it has ended by itself."""
        with suppress(subprocess.TimeoutExpired):
            if grace_s:
                self.process.wait(grace_s)
        self._end.detach()
        _kill(self.process)
        return self.process.wait()


def _kill(child: subprocess.Popen[bytes]) -> None:
    """It and what it forked. Until it is waited for, nobody else has its number."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _end(child: subprocess.Popen[bytes]) -> None:
    """In whichever thread drops it, which may be an event loop's: the kernel's clearing up is not waited for."""
    _kill(child)
    threading.Thread(target=child.wait, name="reaper", daemon=True).start()
