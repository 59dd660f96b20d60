"""The foreground `mint up`: restart a part that dies, with growing pauses, until it dies too often."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from cli.errors import CliError
from cli.stack import launch
from cli.stack.datadir import Busy
from cli.stack.file import read_stack
from cli.stack.part import Part
from cli.stack.supervisor import Reporter, parts_of, restart

MAX_DEATHS = 5
WINDOW_S = 300.0
FIRST_PAUSE_S = 1.0


@dataclass
class Deaths:
    """When one part died lately, and when it may be started again."""

    times: deque[float] = field(default_factory=deque)
    given_up: bool = False
    due: float | None = None

    def record(self, now: float) -> float | None:
        """The pause before the next start, or None when it died MAX_DEATHS times within WINDOW_S."""
        self.times.append(now)
        while self.times and now - self.times[0] > WINDOW_S:
            self.times.popleft()
        if len(self.times) >= MAX_DEATHS:
            self.given_up = True
            return None
        pause = float(FIRST_PAUSE_S * 2 ** (len(self.times) - 1))
        self.due = now + pause
        return pause


def watch(data: Path, report: Reporter, poll_s: float = 0.5) -> None:
    """Until SIGINT or SIGTERM. Returns then; the caller stops the stack."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    deaths: dict[str, Deaths] = {}
    try:
        while not stop.wait(poll_s):
            launch.reap()
            look(data.resolve(), deaths, report)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def look(data: Path, deaths: dict[str, Deaths], report: Reporter) -> None:
    """One round over all parts."""
    stack = read_stack(data)
    if stack is None:
        return
    stores, services = parts_of(data, stack)
    for part in (*stores, *services):
        process = stack.processes.get(part.name)
        if process is None:
            continue
        if process.alive:
            deaths.get(part.name, Deaths()).given_up = False
        else:
            _dead(data, part, deaths.setdefault(part.name, Deaths()), report)


def _dead(data: Path, part: Part, deaths: Deaths, report: Reporter) -> None:
    now = time.monotonic()
    if deaths.given_up:
        return
    if deaths.due is None:
        pause = deaths.record(now)
        if pause is None:
            report.note(
                f"{part.name} died {MAX_DEATHS} times within {WINDOW_S:.0f} s and stays down until the next mint up;"
                f" {launch.describe_log(data, part.name)}"
            )
        else:
            report.note(
                f"{part.name} died; starting it again in {pause:.0f} s (log: {launch.log_path(data, part.name)})"
            )
    elif now >= deaths.due:
        try:
            restart(data, part, report)
            deaths.due = None
        except Busy:
            return
        except CliError as error:
            deaths.due = None
            report.note(f"{part.name} could not be started again: {error}")
