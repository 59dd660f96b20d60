"""Faults on demand, for tests: this process kills itself at a named point, once.

`MINT_FAULT=<service>:<point>`; the first time that service reaches the point it leaves a marker file in
`MINT_FAULT_DIR` and sends itself SIGKILL. The marker keeps the restarted process from dying again.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Literal

from shared.errors import Fatal

__all__ = ["FaultPoint", "Faults"]

FaultPoint = Literal["before_files", "after_files", "after_row", "after_publish"]
POINTS = ("before_files", "after_files", "after_row", "after_publish")


class Faults:
    """Does nothing unless this service's fault is named. Raises Fatal for a fault that cannot be."""

    def __init__(self, service: str, fault: str = "", directory: Path | None = None) -> None:
        named, _, point = fault.partition(":")
        if fault and (point not in POINTS or directory is None):
            raise Fatal(f"MINT_FAULT is {fault!r}; write <service>:<one of {', '.join(POINTS)}> and set MINT_FAULT_DIR")
        self._point = point if named == service else ""
        self._marker = directory / f"{service}-{point}" if directory is not None else None

    def hit(self, point: FaultPoint) -> None:
        if point != self._point or self._marker is None:
            return
        try:
            self._marker.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
