"""The stack file, and telling our process from another with the same pid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli.errors import CliError
from cli.stack.file import Process, Stack, identify, read_stack, stack_path, write_stack


def test_it_reads_back_what_was_written(tmp_path: Path) -> None:
    assert read_stack(tmp_path) is None
    stack = Stack(ports={"gateway": 8700}, processes={"gateway": Process(pid=1, started="x", settings="s")})
    write_stack(tmp_path, stack)
    assert read_stack(tmp_path) == stack
    assert stack.url("gateway") == "http://127.0.0.1:8700"


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    stack_path(tmp_path).write_text("{}x")
    with pytest.raises(CliError, match=r"stack\.json cannot be read"):
        read_stack(tmp_path)


def test_a_process_is_ours_by_pid_and_start_time() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        ours = identify(child.pid)
        assert ours.alive
        assert not ours.model_copy(update={"started": "another time"}).alive
        child.communicate(b"\n")
    assert not ours.alive


def test_a_zombie_is_over() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ours = identify(child.pid)
    assert child.stdin is not None
    child.stdin.write(b"\n")
    child.stdin.close()
    while ours.alive:
        pass
    assert child.wait() == 0
