"""Forks of a prepared process, each of which reads one completion; uses the standard library alone.

In: work and a request. Out: a score between 0 and 1, or why there is none and who is to blame for that.
Invariants: what a completion changes is gone with its fork; of what a fork says only a score is believed.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import signal
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]

FORBIDDEN = 77
"""The exit status of a process that tried what `confine.py` takes away."""
LEAVING_S = 5.0
MOST_BYTES = 64 * 1024


class Forks:
    """Scores in forks of this process. Made before `confine`, which leaves it the only one to make any."""

    def __init__(self, confine: Any, cpu_s: float, memory_mib: int, watch: Callable[[int], None]) -> None:
        """`confine` is that module; `watch` waits for a file and for the end of whoever asks."""
        self._confine, self._cpu_s, self._memory_mib, self._watch = confine, cpu_s, memory_mib, watch
        self._filter = confine.Filter(in_a_fork=True)
        self._forking = False

    def confine(self) -> None:
        self._confine.give_up_writing()
        self._confine.Filter(in_a_fork=False).install()
        # Pages that no collection touches stay shared with the forks.
        gc.collect()
        gc.freeze()
        self._confine.refuse(FORBIDDEN, lambda: self._forking)

    def score(self, work: Callable[[Any], Answer], request: Any) -> Answer:
        """{"score": in 0 to 1} or {"unknown": True}; else {"error", "over"} when the work is to blame, and
        {"lost"} when the machine is."""
        parent = os.getpid()
        readable, writable = os.pipe()
        self._forking = True
        try:
            pid = os.fork()
        except OSError as error:
            os.close(readable)
            os.close(writable)
            return {"lost": f"no process can be started: {error}"}
        finally:
            self._forking = False
        if pid == 0:
            try:
                self._forked(work, request, parent, writable)
            finally:
                os._exit(1)
        os.close(writable)
        told = b""
        while len(told) <= MOST_BYTES:
            self._watch(readable)
            part = os.read(readable, MOST_BYTES)
            if not part:
                break
            told += part
        os.close(readable)
        # One that has closed its pipe and stays would be waited for unwatched; the alarm ends both.
        signal.setitimer(signal.ITIMER_REAL, LEAVING_S)
        status = os.waitpid(pid, 0)[1]
        signal.setitimer(signal.ITIMER_REAL, 0)
        return self._verdict(status, told)

    def _forked(self, work: Callable[[Any], Answer], request: Any, parent: int, writable: int) -> None:
        self._confine.end_with_parent(parent)
        # The requests and answers of others pass through the rest.
        for other in _open_files():
            if other > 2 and other != writable:
                os.close(other)
        os.dup2(1, 0)
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
        self._filter.install()
        try:
            answer = work(request)
        except MemoryError:
            answer = {"error": f"it needs more than {self._memory_mib} MiB"}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        os.write(writable, json.dumps(answer).encode())
        os._exit(0)

    def _verdict(self, status: int, told: bytes) -> Answer:
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL:
            return {"lost": "the process for it was killed; is the machine out of memory?"}
        if code == -signal.SIGPROF:
            return {"error": f"it took more than {self._cpu_s:g} s of CPU time", "over": True}
        if code in (FORBIDDEN, -signal.SIGSYS):
            return {"error": "it tried to reach a file, a program, a connection or a process", "over": True}
        try:
            answer = json.loads(told)
            if answer.get("unknown") is True:
                return {"unknown": True}
            score = answer.get("score")
            if isinstance(score, float) and math.isfinite(score):
                return {"score": min(max(score, 0.0), 1.0)}
            return {"error": str(answer["error"])[:300], "over": True}
        except (ValueError, LookupError, AttributeError, RecursionError):
            return {"error": f"the process for it ended with {code} and no score", "over": True}


def _open_files() -> list[int]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return [number for number in range(min(limit, 256)) if _is_open(number)]


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
