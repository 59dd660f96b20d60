"""Runs with several open commands, on a `Lab`: work for one of them, in any order, and look at what is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mint_schemas.commands import RolloutRequested, UpdateRequested

from services.catalog.tables import CommandRow
from shared.catalog.api import Result, UpdateResult
from tests.catalog_kit import TINY, Lab, open_commands, put_nothing

Choose = Callable[[Sequence[str]], str]
"""The command, of those that are open, that ends first."""


def dpo(policy: str = "acme/adder", steps: int = 2, **other: Any) -> dict[str, Any]:
    data = {"kind": "jsonl", "data": put_nothing("data/acme/pairs", b"pairs").model_dump()}
    return {"policy": policy, "base": TINY, "method": {"kind": "dpo", "steps": steps, "data": data}, **other}


def with_method(body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**body, "method": {**body["method"], **fields}}


def opened(lab: Lab, run_id: str) -> list[str]:
    """Every open command, without the run's id."""
    return [command_id.split(":", 1)[1] for command_id in lab.database.read_now(open_commands, run_id)]


def work_on(lab: Lab, run_id: str, name: str) -> None:
    """One worker does one command, and the fact reaches the catalog."""
    command_id = f"{run_id}:{name}"
    taken = lab.take(command_id)
    assert taken.status == "granted", taken
    lab.commit(command_id, taken.epoch)
    lab.advance(run_id)


def finish_choosing(lab: Lab, run_id: str, choose: Choose) -> list[str]:
    """Until nothing is open; the commands in the order in which they ended."""
    done = []
    while names := opened(lab, run_id):
        done.append(choose(names))
        work_on(lab, run_id, done[-1])
        assert len(done) < 500
    return done


def updates(lab: Lab, run_id: str) -> list[UpdateRequested]:
    found = [lab.body(row.command_id) for row in lab.rows(CommandRow) if row.run_id == run_id]
    return sorted((body for body in found if isinstance(body, UpdateRequested)), key=lambda body: body.step)


def rollouts(lab: Lab, run_id: str) -> list[RolloutRequested]:
    found = [lab.body(row.command_id) for row in lab.rows(CommandRow) if row.run_id == run_id]
    return sorted((body for body in found if isinstance(body, RolloutRequested)), key=lambda body: body.step)


def skips(steps: Callable[[int], bool]) -> Callable[[Result], Result]:
    """What a worker answers for the steps that made no optimizer step."""

    def change(result: Result) -> Result:
        if not isinstance(result, UpdateResult) or not steps(result.checkpoint.step):
            return result
        return result.model_copy(update={"skipped": True, "adapter_changed": False, "metrics": {"kept_groups": 0.0}})

    return change


def counts_tokens(tokens: float) -> Callable[[Result], Result]:
    """Every update trains on so many tokens."""

    def change(result: Result) -> Result:
        if not isinstance(result, UpdateResult):
            return result
        return result.model_copy(update={"metrics": {**result.metrics, "tokens": tokens}})

    return change
