"""Processes are killed in the middle of a run; afterwards nothing is missing and nothing is there twice.

Every writing handler is killed at its four named points, and each part of the stack once at a random
moment. `audit` then reads what the catalog and the bus really hold.
"""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e import method_specs as specs
from tests.e2e.runs import Runs
from tests.stacks import LETTERS, StackProcess, write_prompts
from tests.tiny import TINY_NAME

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUICK = {
    "MINT_SERVING_DTYPE": "float32",
    "MINT_LEARNER_PRECISION": "float32",
    "MINT_HEARTBEAT_S": "1",
    "MINT_ACK_WAIT_S": "3",
    "MINT_CATALOG_LEASE_TTL_S": "4",
    "MINT_CATALOG_COMMAND_DEADLINE_S": "6",
    "MINT_CATALOG_DRIVE_EVERY_S": "2",
}
"""The waits of a crash, short enough for a test; everything else is as it is."""

POINTS = ("before_files", "after_files", "after_row", "after_publish")
PARTS = ("nats", "s3", "catalog", "gateway", "rollout", "learner", "exporter", "evaluator", "serving")
STEPS = 4


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, bases: Path) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("faults")
    stack = StackProcess(directory / "data", "transformers", bases, QUICK)
    try:
        stack.up()
        yield World(stack, directory)
    finally:
        stack.down()


class World:
    """A stack whose parts die, and the runs on it."""

    def __init__(self, stack: StackProcess, directory: Path) -> None:
        self.stack, self._directory = stack, directory
        self._data = stack.mint_json("data", "put", str(write_prompts(directory / "prompts.jsonl")), "--tenant", "acme")
        self._url = stack.url

    def start(self, policy: str) -> str:
        """A GRPO run that evaluates its reference, its last revision, and promotes."""
        task = {"kind": "jsonl", "data": self._data, "reward": LETTERS}
        method = {"kind": "grpo", "steps": STEPS, "task": task, "prompts_per_step": 4, "group_size": 4, "max_tokens": 4}
        evaluation = {"task": task, "items": 4, "max_tokens": 4, "gate": {"at_least": 0.0}}
        request = {"policy": policy, "base": TINY_NAME, "method": method, "evaluation": evaluation}
        spec = self._directory / f"{policy.replace('/', '-')}.json"
        spec.write_text(json.dumps(request))
        return str(self.stack.mint_json("train", str(spec))["run_id"])

    def run(self, run_id: str) -> dict[str, Any] | None:
        """The run now, or None while the gateway or the catalog is away."""
        try:
            answer = httpx.get(
                f"{self._url}/mint/v1/runs/{run_id}", headers={"Authorization": "Bearer tml-dev"}, timeout=20
            )
        except httpx.HTTPError:
            return None
        found: dict[str, Any] | None = answer.json() if answer.status_code == 200 else None
        return found

    def wait(self, run_id: str, until: str = "completed", step: int = 0, timeout: float = 180) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        run: dict[str, Any] | None = None
        while time.monotonic() < deadline:
            run = self.run(run_id) or run
            if run is not None and (run["state"] == until or (until == "step" and run["step"] >= step)):
                return run
            assert run is None or run["state"] not in ("failed", "cancelled"), run["outcome"]
            time.sleep(0.1)
        raise AssertionError(f"{run_id} is not {until} {step or ''} after {timeout} s: {run}")

    def arm(self, service: str, point: str, directory: Path) -> None:
        """Start `service` anew, so that it kills itself at `point`; it may do so before all are healthy."""
        if self.stack.status()["services"][service]["state"] != "dead":
            self.stack.kill(service)
        self.stack.up({"MINT_FAULT": f"{service}:{point}", "MINT_FAULT_DIR": str(directory)}, check=False)

    def died(self, service: str, point: str, directory: Path, timeout: float = 90) -> None:
        """Wait until the service has killed itself at `point`."""
        deadline = time.monotonic() + timeout
        while not (directory / f"{service}-{point}").exists():
            assert time.monotonic() < deadline, f"{service} never reached {point}: {self.stack.log(service)}"
            time.sleep(0.05)

    def audit(self, run_id: str, policy: str) -> None:
        """Every step once, each from the one before; revisions without gap or double; one promotion."""
        db = sqlite3.connect(f"file:{self.stack.data / 'catalog.db'}?mode=ro", uri=True)
        db.row_factory = sqlite3.Row
        try:
            commands = db.execute("SELECT * FROM commands WHERE run_id = ?", [run_id]).fetchall()
            revisions = db.execute("SELECT * FROM revisions WHERE policy = ? ORDER BY number", [policy]).fetchall()
            moves = db.execute("SELECT * FROM alias_moves WHERE policy = ?", [policy]).fetchall()
            _outbox_empties(db)
        finally:
            db.close()
        assert all(command["state"] == "committed" for command in commands)
        of = {
            kind: sorted(c["step"] for c in commands if c["kind"] == kind) for kind in ("rollout", "update", "export")
        }
        assert of == {key: list(range(1, STEPS + 1)) for key in ("rollout", "update", "export")}
        assert [(r["number"], r["step"]) for r in revisions] == [(n, n) for n in range(1, STEPS + 1)]
        assert [m["revision"] for m in moves] == [f"{policy}@{STEPS}"]
        results = {(c["kind"], c["step"]): json.loads(c["result"]) for c in commands}
        bodies = {(c["kind"], c["step"]): json.loads(c["body"]) for c in commands}
        for step in range(2, STEPS + 1):
            assert results["rollout", step]["revision"] == f"{policy}@{step - 1}"
            start = bodies["update", step]["start"]["files"]["adapter.safetensors"]["sha256"]
            assert start == results["update", step - 1]["checkpoint"]["files"]["adapter.safetensors"]["sha256"]


def _outbox_empties(db: sqlite3.Connection, timeout: float = 20) -> None:
    """The relay publishes behind the transaction that ends a run, and nothing stays unpublished."""
    deadline = time.monotonic() + timeout
    while rows := db.execute("SELECT type FROM outbox WHERE published_at IS NULL").fetchall():
        assert time.monotonic() < deadline, f"never published: {[row['type'] for row in rows]}"
        time.sleep(0.1)


@pytest.mark.parametrize("service", ["rollout", "learner", "exporter"])
def test_a_worker_dies_at_each_of_its_four_points(world: World, service: str, tmp_path: Path) -> None:
    """SkyRL#2035: a request that is delivered again is not applied again."""
    policy = f"acme/dies-in-{service}"
    run_id = ""
    for point in POINTS:
        world.arm(service, point, tmp_path)
        run_id = run_id or world.start(policy)
        world.died(service, point, tmp_path)
    world.stack.up()
    assert world.wait(run_id)["promoted"]
    world.audit(run_id, policy)


@pytest.mark.parametrize("point", POINTS)
def test_the_evaluator_dies_at_each_of_its_four_points(world: World, point: str, tmp_path: Path) -> None:
    policy = f"acme/dies-in-evaluator-{point.replace('_', '-')}"
    world.arm("evaluator", point, tmp_path)
    run_id = world.start(policy)
    world.died("evaluator", point, tmp_path)
    world.stack.up()
    assert world.wait(run_id)["promoted"]
    world.audit(run_id, policy)


@pytest.mark.parametrize("point", ["after_row", "after_publish"])
def test_the_catalog_dies_with_a_message_promised(world: World, point: str, tmp_path: Path) -> None:
    """The outbox: what a transaction promised is published after the restart, under the same id."""
    policy = f"acme/dies-in-catalog-{point.replace('_', '-')}"
    run_id = world.start(policy)
    world.arm("catalog", point, tmp_path)
    world.died("catalog", point, tmp_path)
    world.stack.up()
    assert world.wait(run_id)["promoted"]
    world.audit(run_id, policy)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_killed_at_a_random_moment(world: World, part: str) -> None:
    policy = f"acme/without-{part}"
    moment = random.Random(part)
    run_id = world.start(policy)
    world.wait(run_id, "step", step=moment.randint(0, STEPS - 2))
    time.sleep(moment.uniform(0, 1.0))
    world.stack.kill(part)
    time.sleep(moment.uniform(0, 1.0))
    world.stack.up()
    assert world.wait(run_id)["promoted"]
    world.audit(run_id, policy)


def start_twice(runs: Runs, name: str) -> str:
    """A run that is the same on any stack: its id, its seeds and its data are."""
    if name == "dpo":
        return runs.start("acme/dpo-twice", specs.dpo(runs.put(specs.PAIRS), steps=6), key="dpo-twice")
    record = {"epochs": 2, "minibatches": 2, "kl": {"estimator": "k3", "coefficient": 0.05}}
    method = specs.grpo(specs.task(runs.put(specs.QUESTIONS)), steps=8, **record)
    return runs.start("acme/grpo-twice", method, key="grpo-twice")


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_a_learner_killed_inside_a_record_changes_no_byte(
    world: World, shared_stack: StackProcess, name: str, tmp_path: Path
) -> None:
    """Killed with the first step's files written, then with its row committed, so that the second step of a
    record of 2 × 2 begins in a process that saw nothing of the first. Sampling is seeded and the learner has
    one thread, so that an undisturbed run on another stack must give the same adapters."""
    policy = f"acme/{name}-twice"
    with Runs(shared_stack) as quiet:
        run_id = start_twice(quiet, name)
        quiet.completed(run_id)
        expected = [(it["step"], it["adapter_sha256"]) for it in quiet.revisions(policy)]
    world.arm("learner", "after_files", tmp_path)
    with Runs(world.stack) as runs:
        assert start_twice(runs, name) == run_id
        world.died("learner", "after_files", tmp_path)
        world.arm("learner", "after_row", tmp_path)
        world.died("learner", "after_row", tmp_path)
        assert len(runs.facts(run_id, "policy.updated")) == 1
        world.stack.up()
        runs.completed(run_id)
        assert [(it["step"], it["adapter_sha256"]) for it in runs.revisions(policy)] == expected
        assert [it["step"] for it in runs.facts(run_id, "policy.updated")] == list(range(1, 7 if name == "dpo" else 9))


@contextmanager
def another_learner(stack: StackProcess) -> Iterator[subprocess.Popen[bytes]]:
    """A second learner of the same base, as the first one was started."""
    pid = stack.pid("learner")
    assert pid is not None
    first = psutil.Process(pid)
    with (stack.data / "logs" / "learner-2.log").open("ab") as log:
        env = {**first.environ(), "MINT_PORT": "0"}
        process = subprocess.Popen(first.cmdline(), env=env, stdout=log, stderr=log, cwd=stack.data)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_two_learners_share_a_base_and_one_of_them_dies(world: World) -> None:
    """nats.go#1929: each step is made once, by whichever holds the lease."""
    policy = "acme/two-learners"
    world.stack.up()
    with another_learner(world.stack) as second:
        run_id = world.start(policy)
        world.wait(run_id, "step", step=1)
        world.stack.kill("learner")
        assert world.wait(run_id)["promoted"]
        assert second.poll() is None
    assert run_id in (world.stack.data / "logs" / "learner-2.log").read_text()
    world.stack.up()
    world.audit(run_id, policy)
