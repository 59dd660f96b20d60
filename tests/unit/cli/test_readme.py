"""What the README shows is true: requests parse, tasks and rewards exist, commands and options too."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from mint_schemas import TrainRequested
from mint_schemas.training import Reward, Task
from pydantic import TypeAdapter

from cli.gateway import Gateway
from cli.main import app
from cli.run_commands import train

README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
RUNBOOK = (Path(__file__).parents[3] / "docs" / "runbook.md").read_text(encoding="utf-8")


def _blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_each_json_block_is_a_request_and_every_method_has_one() -> None:
    requests = [TrainRequested.model_validate_json(block) for block in _blocks("json")]
    assert [request.method.kind for request in requests] == ["sft", "dpo", "grpo"]


def test_a_dry_run_says_what_each_would_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Valid(Gateway):
        def post(self, path: str, body: Any) -> Any:
            assert (path, body["dry_run"]) == ("/mint/v1/runs", True)
            return {"policy": body["policy"], "base": body["base"]}

    monkeypatch.setattr("cli.run_commands.connect", lambda url, data: Valid("http://gateway"))
    for block in _blocks("json"):
        monkeypatch.setattr("sys.stdin", io.StringIO(block))
        train("-", dry_run=True)
    said = [line.split(": ", 2)[2] for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "sft, 40 steps, 32 chats a step, task arithmetic",
        "dpo, 60 steps, 16 pairs a step",
        "grpo, 60 steps, 12 prompts × 8 samples a record, 2 steps a record, task reasoning_gym basic_arithmetic",
    ]


def test_each_line_of_data_is_json() -> None:
    (block,) = _blocks("jsonl")
    keys = [set(json.loads(line)) for line in block.splitlines()]
    assert keys == [{"messages"}, {"prompt", "chosen", "rejected"}, {"prompt", "answer"}]


def test_every_task_and_reward_of_the_tables_exists_and_none_is_missing() -> None:
    file = {"key": "data/acme/x", "sha256": "0" * 64, "size": 9}
    found: dict[Any, set[str]] = {Task: set(), Reward: set()}
    for kind, rows in ((Task, "| task |"), (Reward, "| reward |")):
        table = README[README.index(rows) :].split("\n\n")[0]
        for text in re.findall(r"^\| `(\{.*?\})` \|", table, re.MULTILINE):
            filled = text.replace('"reward": {…}', '"reward": {"kind": "exact_match"}').replace("{…}", json.dumps(file))
            found[kind].add(TypeAdapter(kind).validate_json(filled).kind)
    assert found[Task] == {"arithmetic", "reasoning_gym", "jsonl"}
    assert found[Reward] == {"exact_match", "regex", "math_verify", "plugin", "webhook"}


def test_the_plugin_scores() -> None:
    (block,) = _blocks("py")
    names: dict[str, Any] = {}
    exec(block, names)
    samples = [SimpleNamespace(completion=text) for text in ("Please wait", "no")]
    assert names["politeness"]({"word": "please"})(samples) == [1.0, 0.0]


@pytest.mark.parametrize("text", [README, RUNBOOK], ids=["readme", "runbook"])
def test_every_command_and_option_exists(text: str) -> None:
    root: Any = typer.main.get_command(app)
    seen = 0
    for line in re.findall(r"(?:`|^)mint ([a-z].*?)(?:`|$)", text, re.MULTILINE):
        for words in _alternatives(line.split("#")[0].replace("&&", ";").split(";")[0]):
            command = root
            for word in words:
                if not hasattr(command, "commands"):
                    break
                assert word in command.commands, f"mint {line}"
                command = command.commands[word]
            known = {option for parameter in command.params for option in parameter.opts}
            given = set(re.findall(r"--[a-z-]+", line.split("|  ")[0].split("#")[0].split("&&")[0]))
            assert given <= known, f"mint {line}"
            seen += 1
    assert seen > 8


def _alternatives(line: str) -> list[list[str]]:
    words = [word for word in line.split() if not word.startswith(("-", "["))]
    split = [word.replace("\\|", "|").split("|") for word in words]
    found: list[list[str]] = [[]]
    for choices in split:
        found = [[*words, choice] for words in found for choice in choices]
    return found
