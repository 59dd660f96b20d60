"""The learner as two processes under torchrun, on the real bus and catalog: a run ends as with one, also
when either process is killed on the way."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.stacks import LETTERS, StackProcess, write_prompts
from tests.tiny import TINY_NAME

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# the waits after a crash, short enough for a test
QUICK = {
    "MINT_SERVING_DTYPE": "float32",
    "MINT_LEARNER_PRECISION": "float32",
    "MINT_HEARTBEAT_S": "1",
    "MINT_ACK_WAIT_S": "3",
    "MINT_CATALOG_LEASE_TTL_S": "4",
    "MINT_CATALOG_COMMAND_DEADLINE_S": "6",
    "MINT_CATALOG_DRIVE_EVERY_S": "2",
}
STEPS = 6
POLICY = "acme/ranked"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, bases: Path) -> Iterator[StackProcess]:
    found = StackProcess(tmp_path_factory.mktemp("ranks") / "data", "transformers", bases, QUICK)
    try:
        yield found.up()
    finally:
        found.down()


class Torchrun:
    """Two learner processes, started anew when one of them dies."""

    def __init__(self, process: subprocess.Popen[bytes], health: str) -> None:
        self.process, self._health = process, health

    def ready(self) -> bool:
        assert self.process.poll() is None, f"torchrun ended with {self.process.returncode}"
        try:
            return httpx.get(self._health, timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def ranks(self) -> dict[str, psutil.Process]:
        found = {}
        for child in psutil.Process(self.process.pid).children():
            environ = child.environ()
            if "RANK" in environ:
                found[environ["RANK"]] = child
        return found


@contextmanager
def torchrun(environ: Mapping[str, str], log: Path) -> Iterator[Torchrun]:
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--max-restarts", "2", "-m", "services.learner"],
            env={**environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield Torchrun(process, f"http://127.0.0.1:{environ['MINT_PORT']}/healthz")
    finally:
        process.terminate()
        process.wait(60)


def _until(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not {what} after {timeout_s} s"
        time.sleep(0.1)


def _start(stack: StackProcess, directory: Path) -> str:
    data = stack.mint_json("data", "put", str(write_prompts(directory / "prompts.jsonl")), "--tenant", "acme")
    task = {"kind": "jsonl", "data": data, "reward": LETTERS}
    method = {"kind": "grpo", "steps": STEPS, "task": task, "prompts_per_step": 4, "group_size": 4, "max_tokens": 4}
    spec = directory / "run.json"
    spec.write_text(json.dumps({"policy": POLICY, "base": TINY_NAME, "method": method}))
    return str(stack.mint_json("train", str(spec))["run_id"])


def _rows(stack: StackProcess, query: str, *values: str) -> list[dict[str, Any]]:
    db = sqlite3.connect(f"file:{stack.data / 'catalog.db'}?mode=ro", uri=True)
    db.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in db.execute(query, values)]
    finally:
        db.close()


def test_a_run_is_trained_by_two_processes_either_of_which_dies(stack: StackProcess, tmp_path: Path) -> None:
    """Nothing is lost and nothing is there twice: each step is committed once, each exported once."""
    learner = stack.pid("learner")
    assert learner is not None
    environ = psutil.Process(learner).environ()
    stack.kill("learner", signal.SIGTERM)
    with torchrun(environ, tmp_path / "torchrun.log") as group:
        _until(group.ready, "ready")
        run_id = _start(stack, tmp_path)
        with httpx.Client(base_url=stack.url, headers={"authorization": "Bearer tml-dev"}, trust_env=False) as http:

            def run() -> dict[str, Any]:
                found: dict[str, Any] = http.get(f"/mint/v1/runs/{run_id}", timeout=20).raise_for_status().json()
                assert found["state"] not in ("failed", "cancelled"), found["outcome"]
                return found

            for step, rank in ((1, "1"), (3, "0")):
                _until(lambda step=step: run()["step"] >= step, f"at step {step}")  # type: ignore[misc]
                before = group.ranks()
                before[rank].kill()
                _, alive = psutil.wait_procs(list(before.values()), timeout=30)
                assert not alive
            _until(lambda: run()["state"] == "completed", "completed")
        members = list(group.ranks().values())
        assert len(members) == 2
    assert not psutil.wait_procs(members, timeout=30)[1]
    updates = _rows(
        stack, "SELECT step, state FROM commands WHERE run_id = ? AND kind = 'update' ORDER BY step", run_id
    )
    assert updates == [{"step": step, "state": "committed"} for step in range(1, STEPS + 1)]
    revisions = _rows(stack, "SELECT number, step FROM revisions WHERE policy = ? ORDER BY number", POLICY)
    assert revisions == [{"number": n, "step": n} for n in range(1, STEPS + 1)]
