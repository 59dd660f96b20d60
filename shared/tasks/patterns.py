"""Matching a pattern that somebody else wrote, bounded in time and memory.

In: the pattern and texts. Out: whether it matches and its first group. Invariant: whatever the pattern,
this process keeps its memory and its time; the work happens in a child that the kernel bounds, and that
ends with its input, so also when this process is killed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from shared.tasks.pattern_host import CPU_S

__all__ = ["Pattern", "PatternError"]

_HOST = Path(__file__).with_name("pattern_host.py")


class PatternError(Exception):
    """The pattern does not compile, or a match took more than it may."""


class Pattern:
    """Safe from many threads; they take turns. `groups` counts the pattern's groups."""

    def __init__(self, pattern: str) -> None:
        """Raises PatternError for a pattern that does not compile within the bounds."""
        self._pattern = pattern
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        with self._lock:
            self.groups: int = self._started()["groups"]

    def search(self, text: str) -> tuple[bool, str | None]:
        """(matched, first group or None). Raises PatternError."""
        with self._lock:
            try:
                answer = self._asked(text)
            except BrokenPipeError:
                # Ended from outside, not by this text; a fresh child answers the same.
                answer = self._asked(text)
            return bool(answer["matched"]), answer["group"]

    def _asked(self, text: str) -> dict[str, Any]:
        if self._child is None:
            self._started()
        return self._exchange(text)

    def _started(self) -> dict[str, Any]:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_HOST)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._child = child
        self._end = weakref.finalize(self, _end, child)
        return self._exchange(self._pattern)

    def _exchange(self, value: str) -> dict[str, Any]:
        """Raises BrokenPipeError when the child was ended by anything but its bounds."""
        child = self._child
        assert child is not None
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
            self._child = None
            self._end()
            if child.returncode == -signal.SIGPROF:
                raise PatternError(f"it took more than {CPU_S:g} s of CPU time")
            raise BrokenPipeError(f"the pattern's process ended with {child.returncode}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PatternError(answer["error"])
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
