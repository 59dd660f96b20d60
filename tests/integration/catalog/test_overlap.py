"""Runs that overlap, are scored on the way and end early, over a real nats-server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mint_schemas.events import RolloutCompleted, RunEnded

from shared.bus import Bus
from shared.catalog.api import CancelRequest
from tests.catalog_flows import with_method
from tests.catalog_kit import evaluation, eventually, grpo
from tests.catalog_world import LosesPublications, World, open_world

ADDER = "acme/adder"


async def _told(world: World, fact: str) -> bool:
    return any(message.headers["ce-type"] == f"mint.v1.{fact}" for message in await world.messages("EVENTS"))


async def _sampled_with(world: World, run_id: str) -> dict[int, str | None]:
    """Record step → the revision that the fact names."""
    entries = [entry for entry in await world.journal(run_id) if entry.type == "mint.v1.rollout.completed"]
    facts = [RolloutCompleted.model_validate(entry.body) for entry in entries]
    assert len(facts) == len({fact.step for fact in facts})
    return {fact.step: fact.revision for fact in facts}


async def test_a_rollout_is_sampled_while_the_update_is_at_work(world: World) -> None:
    """Each waits for the other to have begun: only a run that overlaps comes to its end."""
    began = {"update:1": asyncio.Event(), "rollout:3": asyncio.Event()}

    async def before(command: Any) -> None:
        name = command.command_id.split(":", 1)[1]
        if name in began:
            began[name].set()
            async with asyncio.timeout(20):
                for event in began.values():
                    await event.wait()

    world.before = before
    run_id = await world.train(with_method(grpo(steps=4), staleness=2))
    run = await world.until(run_id, "completed", "failed", timeout_s=60)
    assert run.outcome == f"promoted: {ADDER}:live is {ADDER}@4"
    assert await _sampled_with(world, run_id) == {1: None, 2: None, 3: None, 4: f"{ADDER}@1"}


async def test_overlap_survives_lost_events_and_a_restart_with_each_command_done_once(
    tmp_path: Path, make_bus: Callable[[], Bus]
) -> None:
    """SkyRL#2035: the first event of every command is lost after its row, and the catalog restarts midway."""
    async with open_world(tmp_path, make_bus) as world:
        first = await world.bus()
        await world.start_workers(LosesPublications(first))
        await world.start_replica()
        run_id = await world.train(with_method(grpo(steps=10), staleness=2, epochs=2))
        await eventually(lambda: "update:4" in world.jobs)
        await first.drain()
        await world.stop_catalog()
        await world.start_catalog()
        await world.start_workers(LosesPublications(await world.bus()))
        run = await world.until(run_id, "completed", "failed", timeout_s=90)
        assert run.state == "completed", run.outcome
        done = {entry.body["command_id"] for entry in await world.journal(run_id) if "command_id" in entry.body}
        assert len(done) == 5 + 10 + 5
        assert await _sampled_with(world, run_id) == {
            1: None, 3: None, 5: None, 7: f"{ADDER}@1", 9: f"{ADDER}@2",
        }  # fmt: skip
        assert (await world.client.policy(ADDER)).revisions == 5


async def test_the_best_revision_of_a_run_that_stopped_becomes_live(world: World) -> None:
    scores = {f"{ADDER}@1": 0.2, f"{ADDER}@2": 0.7, f"{ADDER}@3": 0.6, f"{ADDER}@4": 0.5}
    world.worker.score = lambda revision: scores[revision or ""]
    request = grpo(steps=40, evaluation=evaluation(), eval_every=1, promote="best", stop_when={"no_progress_steps": 2})
    run = await world.until(await world.train(request), "completed", "failed", timeout_s=60)
    assert run.revision == f"{ADDER}@2"
    assert run.outcome == (
        f"promoted: {ADDER}:live is {ADDER}@2 (step 2), the best of 4 scores with 0.7; stopped after step 4 of 40: "
        "no evaluation in 2 steps was above the 0.7 of step 2 (no_progress_steps is 2)"
    )
    assert (await world.client.policy(ADDER)).aliases == {"live": f"{ADDER}@2"}
    assert Counter(job.split(":")[0] for job in world.jobs) == {
        "rollout": 4, "update": 4, "export": 4, "evaluation": 4,
    }  # fmt: skip
    await eventually(partial(_told, world, "run.completed"))
    ended = [m for m in await world.messages("EVENTS") if m.headers["ce-type"] == "mint.v1.run.completed"]
    answer = RunEnded.model_validate_json(ended[0].data)
    assert (answer.revision, answer.score, answer.promoted, len(ended)) == (f"{ADDER}@2", 0.7, True, 1)


async def test_cancel_ends_everything_that_is_open(world: World) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def before(command: Any) -> None:
        if command.command_id.endswith(":rollout:2"):
            begun.set()
            await go.wait()

    world.before = before
    run_id = await world.train(with_method(grpo(steps=50), staleness=2))
    await asyncio.wait_for(begun.wait(), 10)
    await eventually(lambda: "update:1" in world.jobs)
    view = await world.client.cancel(run_id, CancelRequest(actor="ann", reason="enough"))
    assert (view.state, view.outcome) == ("cancelled", "enough (ann)")
    before_end = len(await world.journal(run_id))
    go.set()
    await asyncio.sleep(0.5)
    assert len(await world.journal(run_id)) == before_end
    assert not any(job.startswith("update") and job != "update:1" for job in world.jobs)
