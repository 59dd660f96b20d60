"""`mint up` on the real services: what is dead is started, state survives, the foreground watches."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.stack.part import executable
from tests.stacks import StackProcess
from tests.tiny import TINY_NAME


def test_what_is_dead_is_started_and_state_survives(stack: StackProcess, tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    data = {"kind": "task", "task": {"kind": "arithmetic"}}
    method = {"kind": "sft", "steps": 1, "batch_size": 4, "data": data}
    spec.write_text(json.dumps({"policy": "acme/kept", "base": TINY_NAME, "method": method}))
    stack.mint("train", str(spec), "--follow")
    before = _pids(stack)
    stack.kill("catalog")
    stack.up()
    after = _pids(stack)
    assert {name for name in before if before[name] != after[name]} == {"catalog"}

    stack.down()
    assert not stack.status()["running"]
    stack.up()
    assert [it["revision"] for it in stack.mint_json("revisions", "acme/kept")] == ["acme/kept@1"]
    answer = stack.mint_json("chat", "acme/kept", "--message", "hello", "--max-tokens", "2")
    assert answer["revision"] == "acme/kept@1"


@pytest.mark.slow
def test_the_foreground_restarts_what_dies_and_stops_all_on_interrupt(stack: StackProcess, tmp_path: Path) -> None:
    stack.down()
    with (tmp_path / "up.log").open("w") as log:
        command = [executable("mint", "mint-server"), "up", "--data", str(stack.data)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _until(lambda: bool(stack.status().get("healthy")), 120)
        first = stack.pid("rollout")
        stack.kill("rollout")
        _until(lambda: stack.pid("rollout") not in (None, first) and bool(stack.status().get("healthy")), 60)
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=90)
    said = (tmp_path / "up.log").read_text()
    assert code == 0, said
    assert "rollout died; starting it again" in said
    assert not stack.status()["running"]


def _pids(stack: StackProcess) -> dict[str, int]:
    return {name: part["pid"] for name, part in stack.status()["services"].items()}


def _until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.5)
