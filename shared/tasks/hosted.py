"""Asking processes that the kernel bounds (`host.py`) from threads of this one.

In: an opening, which says what the processes are to be, and requests. Out: their answers. Invariant:
whatever the input, this process keeps its memory and its time; the children end with their input, so also
when this process is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from shared.tasks.host import OPENING_CPU_S, REQUEST_CPU_S

__all__ = ["HostError", "Hosted"]

_HOST = Path(__file__).with_name("host.py")
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "TMPDIR")


class HostError(Exception):
    """The work raised, or took more than it may (`over`)."""

    def __init__(self, message: str, over: bool = False) -> None:
        super().__init__(message)
        self.over = over


class Hosted:
    """Safe from many threads: up to `children` work at once, further ones wait. `opened` is the answer
    to the opening."""

    def __init__(self, opening: dict[str, Any], children: int = 1) -> None:
        """Raises HostError when the opening is refused or takes too much."""
        self._opening = opening
        self._places = threading.BoundedSemaphore(children)
        self._idle = [_Child(opening)]
        self.opened: dict[str, Any] = self._idle[0].opened

    def ask(self, request: Any) -> dict[str, Any]:
        """Raises HostError."""
        with self._places:
            child = self._child()
            try:
                answer = child.exchange(request, REQUEST_CPU_S)
            except BrokenPipeError:
                # Ended from outside, not by this request; a fresh child answers the same.
                child = _Child(self._opening)
                try:
                    answer = child.exchange(request, REQUEST_CPU_S)
                except BrokenPipeError as error:
                    raise HostError(str(error), over=True) from error
            self._idle.append(child)
        if "error" in answer:
            raise HostError(answer["error"], over=answer.get("over", False))
        return answer

    def _child(self) -> _Child:
        try:
            return self._idle.pop()
        except IndexError:
            return _Child(self._opening)


class _Child:
    def __init__(self, opening: dict[str, Any]) -> None:
        self._kind: str = opening["kind"]
        # Sets of texts are ordered by their hash, and some generators draw from sets.
        environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        flags = ["-I", "-S"] if self._kind == "pattern" else ["-P"]
        self.process = subprocess.Popen(
            [sys.executable, *flags, str(_HOST)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
            encoding="utf-8",
        )
        self._end = weakref.finalize(self, _end, self.process)
        try:
            self.opened = self.exchange(opening, OPENING_CPU_S)
        except BrokenPipeError as error:
            raise HostError(str(error), over=True) from error
        if "error" in self.opened:
            raise HostError(self.opened["error"], over=self.opened.get("over", False))

    def exchange(self, value: Any, cpu_s: dict[str, float]) -> dict[str, Any]:
        """Raises BrokenPipeError when the child was ended by anything but its bounds."""
        child = self.process
        assert child.stdin is not None
        assert child.stdout is not None
        line = ""
        try:
            child.stdin.write(json.dumps(value) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            self._end()
            if child.returncode == -signal.SIGPROF:
                raise HostError(f"it took more than {cpu_s[self._kind]:g} s of CPU time", over=True)
            raise BrokenPipeError(f"the process for it ended with {child.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _end(child: subprocess.Popen[str]) -> None:
    """Reap it. It may have ended already, with text for it still unsent."""
    for pipe in (child.stdin, child.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except BrokenPipeError:
            continue
    try:
        child.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
