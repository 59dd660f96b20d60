"""The command itself: usage, one-line errors, exit codes; and a command that imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cli import main as command
from cli.demo.checks import Checks
from cli.errors import CliError


def test_a_failure_is_one_line_and_a_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise CliError("the data directory [red]is[/red] newer", 2)

    monkeypatch.setattr(command, "app", fail)
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: the data directory [red]is[/red] newer\n"


@pytest.mark.parametrize("arguments", [["train"], ["frobnicate"], ["up", "--engine", "steam"]])
def test_wrong_usage_exits_with_2(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["mint", *arguments])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 2


def test_the_command_loads_no_engine_and_no_plots() -> None:
    script = "import sys, cli.main, cli.demo.job; print(sorted({'torch', 'vllm', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_checks_hold_only_when_there_are_some_and_all_do() -> None:
    checks = Checks()
    assert not checks.all_held
    checks.that("one", True)
    assert checks.all_held
    checks.that("two", False, "why")
    assert not checks.all_held
    assert checks.as_data()[1] == {"name": "two", "held": False, "detail": "why"}
