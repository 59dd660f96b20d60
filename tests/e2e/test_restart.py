"""What a restart keeps: everything that was visible, and who may open the data directory at all."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.stacks import LETTERS, StackProcess, write_prompts
from tests.tiny import TINY_NAME

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

POLICY = "acme/lasting"
PROMPT = {"messages": [{"role": "user", "content": "What is 3+4?"}], "max_tokens": 12, "temperature": 0}


def _http(stack: StackProcess) -> httpx.Client:
    return httpx.Client(base_url=stack.url, headers={"authorization": "Bearer tml-dev"}, trust_env=False, timeout=60)


def _trained(stack: StackProcess, tmp_path: Path) -> None:
    """An SFT with a save in the middle, a GRPO after it, a canary, a rollback, and a run that was refused."""
    data = stack.mint_json("data", "put", str(write_prompts(tmp_path / "prompts.jsonl")), "--tenant", "acme")
    task = {"kind": "jsonl", "data": data, "reward": LETTERS}
    sums = {"kind": "task", "task": {"kind": "arithmetic"}}
    rewarded = {"kind": "grpo", "steps": 2, "task": task, "prompts_per_step": 2, "group_size": 4, "max_tokens": 4}
    for method in ({"kind": "sft", "steps": 2, "save_every": 1, "batch_size": 2, "data": sums}, rewarded):
        spec = tmp_path / "spec.json"
        spec.write_text(json.dumps({"policy": POLICY, "base": TINY_NAME, "method": method}))
        stack.mint("train", str(spec), "--follow")
    stack.mint("alias", POLICY, "canary", "1")
    stack.mint("rollback", POLICY)
    stack.mint("rollback", POLICY, "--to", "4")


def _seen(stack: StackProcess) -> dict[str, Any]:
    """Everything that a client can see and that no process makes anew."""
    with _http(stack) as http:

        def get(path: str) -> Any:
            return http.get(path).raise_for_status().json()

        found: dict[str, Any] = {name: get(f"/mint/v1/{name}")["items"] for name in ("runs", "policies")}
        found["journals"] = {run["run_id"]: get(f"/mint/v1/runs/{run['run_id']}/journal") for run in found["runs"]}
        found["moves"] = get(f"/mint/v1/policies/{POLICY}/moves")
        found["revisions"] = get(f"/mint/v1/policies/{POLICY}/revisions")["items"]
        for revision in found["revisions"]:
            revision.pop("ready_on")
        return found


def _answers(stack: StackProcess) -> list[tuple[str | None, str]]:
    answers = []
    with _http(stack) as http:
        for model in (POLICY, f"{POLICY}:canary", f"{POLICY}@2", TINY_NAME):
            answer = http.post("/v1/chat/completions", json={"model": model, **PROMPT}).raise_for_status()
            answers.append((answer.headers.get("mint-revision"), answer.json()["choices"][0]["message"]["content"]))
    return answers


def test_what_was_visible_is_visible_and_answers_the_same(stack: StackProcess, tmp_path: Path) -> None:
    """aibrix#236: after a restart the alias serves the same revision, and nobody has to register it again."""
    _trained(stack, tmp_path)
    seen, answers = _seen(stack), _answers(stack)
    assert [revision for revision, _ in answers] == [f"{POLICY}@4", f"{POLICY}@1", f"{POLICY}@2", None]
    assert len(seen["revisions"]) == 4
    assert len(seen["moves"]) == 5

    stack.mint("down")
    assert not stack.status()["running"]
    stack.up()
    assert _answers(stack) == answers
    assert _seen(stack) == seen


def test_up_on_a_running_stack_starts_only_what_is_dead(stack: StackProcess) -> None:
    def pids() -> dict[str, int]:
        return {name: part["pid"] for name, part in stack.status()["services"].items()}

    before = pids()
    stack.up()
    assert pids() == before
    for part in ("exporter", "nats"):
        stack.kill(part)
    stack.up()
    after = pids()
    assert {name for name in before if before[name] != after[name]} == {"exporter", "nats"}
    assert stack.status()["healthy"]


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_down_stops_what_up_started_and_only_that(stack: StackProcess, bystander: subprocess.Popen[bytes]) -> None:
    """Also a process that has the pid of a part that is over is none of ours."""
    parts = [psutil.Process(part["pid"]) for part in stack.status()["services"].values()]
    stack.mint("down", "--now")
    assert not [part for part in parts if part.is_running() and part.status() != psutil.STATUS_ZOMBIE]
    file = stack.data / "stack.json"
    content = json.loads(file.read_text())
    taken = {**content, "processes": {"rollout": {"pid": bystander.pid, "started": "another boot/1"}}}
    file.write_text(json.dumps(taken))
    assert "nothing was running" in stack.mint("down").stdout
    assert bystander.poll() is None
    file.write_text(json.dumps(content))


def test_an_older_build_refuses_a_newer_data_directory(stack: StackProcess) -> None:
    """The directory's own format, and the database's schema; both are left as they are."""
    stack.mint("down", "--now")
    version = stack.data / "version.json"
    known = version.read_text()
    version.write_text('{"format": 99}')
    done = stack.mint("up", "--detach", check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "has format 99, this build knows up to" in done.stderr
    assert not stack.status()["running"]
    assert version.read_text() == '{"format": 99}'
    version.write_text(known)

    (database,) = stack.data.rglob("catalog.db")
    schema = _schema(database, "9999")
    stack.up(check=False)
    assert not stack.status()["healthy"]
    assert "a newer build wrote it" in stack.log("catalog")
    stack.mint("down", "--now")
    assert _schema(database, schema) == "9999"
    stack.up()
    assert stack.status()["healthy"]


def _schema(database: Path, new: str) -> str:
    """Set the recorded schema; returns the one before."""
    with sqlite3.connect(database) as connection:
        (before,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        connection.execute("UPDATE alembic_version SET version_num = ?", (new,))
    connection.close()
    return str(before)
