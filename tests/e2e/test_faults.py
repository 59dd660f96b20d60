"""Processes are killed in the middle of a run; afterwards nothing is missing and nothing is there twice.

Every writing handler is killed at its four named points, and each part of the stack once at a random
moment. `audit` then reads what the catalog and the bus really hold.
"""

from __future__ import annotations

import json
import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

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
