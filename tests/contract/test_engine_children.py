"""Engine children that outlive a killed parent, with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from services.serving.app import engine_factory
from services.serving.config import ServingSettings
from services.serving.replica import Options
from services.serving.residency import Limits
from shared.ending import end
from shared.engine.children import RECORD_FILE, ChildRecord, end_orphans
from shared.errors import Fatal
from tests.serving_kit import make_base

PARENT = """
import subprocess, sys, time
from pathlib import Path
from shared.engine.children import ChildRecord
record = ChildRecord(Path(sys.argv[1]))
record.start()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
time.sleep(0.5)
print(child.pid, flush=True)
time.sleep(60)
"""


def _wait_gone(pid: int) -> bool:
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def _start_parent(path: Path) -> tuple[subprocess.Popen[str], int]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def _kill(parent: subprocess.Popen[str]) -> None:
    parent.kill()
    parent.wait()
    assert parent.stdout is not None
    parent.stdout.close()


def test_children_of_a_killed_parent_are_ended(tmp_path: Path) -> None:
    path = tmp_path / "state" / "children.json"
    parent, child = _start_parent(path)
    with pytest.raises(Fatal, match=f"running process {parent.pid}"):
        end_orphans(path)
    _kill(parent)
    assert psutil.pid_exists(child)
    assert end_orphans(path) == 1
    assert _wait_gone(child)
    assert not path.exists()
    assert end_orphans(path) == 0


def test_a_reused_pid_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "children.json"
    parent, child = _start_parent(path)
    _kill(parent)
    record = json.loads(path.read_text())
    for entry in record["children"]:
        entry["started"] -= 5.0
    path.write_text(json.dumps(record))
    assert end_orphans(path) == 0
    assert psutil.pid_exists(child)
    psutil.Process(child).kill()


def test_own_children_of_a_dead_engine_are_ended_too(tmp_path: Path) -> None:
    path = tmp_path / "children.json"
    record = ChildRecord(path)
    record.start()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        record.stop()
        assert [p.pid for p in record.alive()] == [child.pid]
        assert json.loads(path.read_text())["parent"]["pid"] == os.getpid()
        assert end_orphans(path) == 1


def test_a_record_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "children.json"
    path.write_text("{}")
    with pytest.raises(Fatal, match=r"children\.json"):
        end_orphans(path)


async def test_a_shutdown_during_the_start_leaves_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start takes up to a minute in a thread that cannot be stopped; the service does not wait for it."""
    options = Options(tmp_path, Limits(capacity=2))
    settings = ServingSettings(serving_base="mini", data_dir=tmp_path)
    started, go_on = threading.Event(), threading.Event()
    children: list[subprocess.Popen[bytes]] = []

    def slow_start(*_: object) -> None:
        record = ChildRecord(tmp_path / "engine" / RECORD_FILE)
        record.start()
        children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        record.stop()
        started.set()
        go_on.wait(20)

    monkeypatch.setattr("services.serving.app.create_engine", slow_start)
    starting = asyncio.create_task(engine_factory(settings, make_base(tmp_path / "base"), options)())  # type: ignore[arg-type]
    assert await asyncio.to_thread(started.wait, 10)
    await end(starting)
    go_on.set()
    assert _wait_gone(children[0].pid)
    children[0].wait(5)
