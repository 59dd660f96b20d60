"""Engine child processes: recorded while they run, ended when they outlive their parent.

An engine that runs in child processes keeps gigabytes in them; after a SIGKILL of the parent they live
on. The record (pid and start time of parent and children) lies in the engine's own state directory.

Invariant: a process is ended only if both its pid and its start time are recorded, so that a reused pid
is never hit.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from shared.errors import Fatal

RECORD_FILE = "engine-children.json"
_END_WAIT_S = 10.0
_START_TOLERANCE_S = 0.05


class ChildRecord:
    """Records every child that this process gets between `start` and `stop`, as they appear, so that a
    kill at any moment leaves at most a fraction of a second unrecorded."""

    def __init__(self, path: Path, interval_s: float = 0.1) -> None:
        self._path = path
        self._interval_s = interval_s
        self._before = {process.pid for process in psutil.Process().children(recursive=True)}
        self._known: dict[int, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="engine-children", daemon=True)

    def start(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def stop(self) -> None:
        """One last look, then no more."""
        self._stopped.set()
        self._thread.join()
        self._look()

    def alive(self) -> list[psutil.Process]:
        return _running(self._known.items())

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._look()

    def _look(self) -> None:
        found = dict(self._known)
        for process in psutil.Process().children(recursive=True):
            if process.pid not in self._before:
                try:
                    found[process.pid] = process.create_time()
                except psutil.NoSuchProcess:
                    continue
        if found != self._known:
            self._known = found
            _write(self._path, found)


def end_orphans(path: Path) -> int:
    """End the recorded children whose parent is gone (or is this process), and forget the record.

    Returns how many were ended. Raises Fatal while their parent, another process, is alive: two
    engines must not share a state directory."""
    record = _read(path)
    if record is None:
        return 0
    parent = (record["parent"]["pid"], record["parent"]["started"])
    if parent[0] != os.getpid() and _running([parent]):
        raise Fatal(f"{path} belongs to the running process {parent[0]}; give each engine a state directory of its own")
    victims = _running((child["pid"], child["started"]) for child in record["children"])
    ended = end_processes(victims)
    path.unlink(missing_ok=True)
    return ended


def end_processes(processes: Iterable[psutil.Process]) -> int:
    """Kill processes and what they started, and wait until they are gone. Raises Fatal for one that stays."""
    family: dict[int, psutil.Process] = {}
    for process in processes:
        try:
            family |= {p.pid: p for p in [*process.children(recursive=True), process]}
        except psutil.NoSuchProcess:
            continue
    for process in family.values():
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(family.values(), timeout=_END_WAIT_S)
    stuck = [p.pid for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    if stuck:
        raise Fatal(f"engine children {stuck} do not end; end them by hand, then start again")
    return len(family)


def _running(pairs: Iterable[tuple[int, float]]) -> list[psutil.Process]:
    found = []
    for pid, started in pairs:
        try:
            process = psutil.Process(pid)
            same = abs(process.create_time() - started) <= _START_TOLERANCE_S
            if same and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def _read(path: Path) -> Any:
    try:
        record = json.loads(path.read_bytes())
        record["parent"]["pid"], record["parent"]["started"]
        [(child["pid"], child["started"]) for child in record["children"]]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise Fatal(f"{path} is no record of engine children ({error!r}); end them by hand and delete it") from error
    return record


def _write(path: Path, children: dict[int, float]) -> None:
    me = psutil.Process()
    record = {
        "parent": {"pid": me.pid, "started": me.create_time()},
        "children": [{"pid": pid, "started": started} for pid, started in sorted(children.items())],
    }
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(record))
    os.replace(beside, path)
