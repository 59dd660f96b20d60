"""Whole runs over a real nats-server: requests in, commands and facts out, whatever is lost or repeated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mint_schemas import Envelope, headers_for
from mint_schemas.cloudevents import run_id_for
from mint_schemas.events import RunEnded
from sqlalchemy.orm import Session

from services.catalog.tables import OutboxRow
from shared.bus import Bus
from shared.catalog.api import CancelRequest, MoveAlias, Rollback
from shared.errors import Fatal, Refused
from shared.worker.lease import LeaseLost
from tests.catalog_kit import evaluation, eventually, grpo, sft
from tests.catalog_world import LosesPublications, World, open_world
from tests.servers import NatsServer


def _facts(messages: list[Any]) -> list[str]:
    return [message.headers["ce-type"].removeprefix("mint.v1.") for message in messages]


def _all_published(session: Session) -> bool:
    return session.query(OutboxRow).filter(OutboxRow.published_at.is_(None)).count() == 0


async def _emptied(world: World) -> bool:
    return await world.messages("COMMANDS") == []


async def _told(world: World, fact: str) -> bool:
    return fact in _facts(await world.messages("EVENTS"))


async def test_sft_then_grpo_become_live_in_one_trace_each(world: World) -> None:
    first = await world.until(await world.train(sft(steps=2)), "completed", "failed")
    assert first.outcome == "promoted: acme/adder:live is acme/adder@1"
    request = grpo(steps=2, evaluation=evaluation(no_worse_than="parent"))
    second = await world.until(await world.train(request, "request-2"), "completed", "failed")
    assert second.outcome == "promoted: acme/adder:live is acme/adder@3"
    assert world.jobs == [
        "update:1", "update:2", "export:2",
        "rollout:1", "update:1", "export:1", "rollout:2", "update:2", "export:2",
        "evaluation:parent", "evaluation:last",
    ]  # fmt: skip
    policy = await world.client.policy("acme/adder")
    assert policy.aliases == {"live": "acme/adder@3"}
    await eventually(lambda: world.app.database.read(_all_published))
    messages = await world.messages("EVENTS")
    assert {message.headers["traceparent"][3:35] for message in messages} == {"ab" * 16}
    assert _facts(messages).count("alias.moved") == 2
    await eventually(lambda: _emptied(world))
    told = [entry.type.removeprefix("mint.v1.") for entry in await world.journal(second.run_id)]
    assert told[-1] == "run.completed"
    assert told.count("policy.updated") == 2


async def test_a_request_published_twice_is_one_run(world: World) -> None:
    run_id = await world.train(sft())
    await world.train(sft(), replay=1)
    await world.until(run_id, "completed")
    await world.train(sft(), replay=2)
    await asyncio.sleep(0.3)
    assert len((await world.client.runs()).items) == 1
    assert world.jobs == ["update:1", "update:2", "export:2"]


async def test_a_worker_killed_after_the_row_applies_every_step_once(
    tmp_path: Path, make_bus: Callable[[], Bus]
) -> None:
    """SkyRL#2035: what is committed is published again on redelivery, never computed again."""
    async with open_world(tmp_path, make_bus) as world:
        lossy = LosesPublications(await world.bus())
        await world.start_workers(lossy)
        await world.start_replica()
        run = await world.until(await world.train(grpo(steps=2)), "completed", "failed")
        assert run.state == "completed", run.outcome
        assert world.jobs == [f"{kind}:{step}" for step in (1, 2) for kind in ("rollout", "update", "export")]
        assert len(lossy.lost) == 6
        await eventually(partial(_told, world, "run.completed"))
        facts = _facts(await world.messages("EVENTS"))
        assert (facts.count("policy.updated"), facts.count("revision.registered")) == (2, 2)


async def test_a_request_that_does_not_validate_is_answered_and_dead_lettered(world: World) -> None:
    body = grpo(steps=0, policy="acme/adder")
    body["base"] = "tiny/lama"
    run = await world.until(await world.train(body), "failed")
    assert "known are tiny/llama" in run.outcome
    assert "method.grpo.steps" in run.outcome
    await eventually(lambda: world.messages("DEAD"))
    dead = await world.messages("DEAD")
    assert dead[0].headers["mint-dead-reason"] == run.outcome
    await asyncio.sleep(0.2)
    ended = [m for m in await world.messages("EVENTS") if m.headers["ce-type"] == "mint.v1.run.failed"]
    answer = RunEnded.model_validate_json(ended[0].data)
    assert (answer.request_source, answer.request_id, len(ended)) == ("shop", "request-1", 1)


async def test_a_body_that_is_no_json_is_answered_too(world: World) -> None:
    headers = headers_for(Envelope("mint.v1.train.requested", "shop", "broken"))
    await world.catalog_bus._js().publish("mint.v1.train.requested.anything", b"{half", headers=headers)
    run = await world.until(run_id_for("shop", "broken"), "failed")
    assert "the body is not JSON" in run.outcome


async def test_a_fatal_job_fails_the_run_and_frees_the_policy(world: World) -> None:
    async def before(command: Any) -> None:
        if command.kind == "rollout":
            raise Fatal("the reward raised on prompt 3+4")

    world.before = before
    await world.until(await world.train(sft(steps=1)), "completed")
    run = await world.until(await world.train(grpo(), "request-2"), "failed")
    assert run.outcome == "rollout of step 1 failed: the reward raised on prompt 3+4"
    assert (await world.client.policy("acme/adder")).aliases == {"live": "acme/adder@1"}
    await world.until(await world.train(sft(steps=1), "request-3"), "completed")


async def test_takes_without_a_commit_end_as_a_failed_run(tmp_path: Path, make_bus: Callable[[], Bus]) -> None:
    async with open_world(tmp_path, make_bus, max_takes=3, lease_ttl_s=0.2) as world:
        await world.start_workers()

        async def before(command: Any) -> None:
            raise LeaseLost("died", cancelled=False)

        world.before = before
        run = await world.until(await world.train(sft()), "failed")
        assert "update of step 1 was taken 3 times without a commit" in run.outcome
        assert world.jobs == ["update:1"] * 3


async def test_cancel_ends_a_run_within_one_step(world: World) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def before(command: Any) -> None:
        begun.set()
        await go.wait()

    world.before = before
    run_id = await world.train(sft(steps=50))
    await asyncio.wait_for(begun.wait(), 10)
    view = await world.client.cancel(run_id, CancelRequest(actor="ann", reason="enough"))
    assert (view.state, view.outcome) == ("cancelled", "enough (ann)")
    go.set()
    await asyncio.sleep(0.5)
    assert world.jobs == ["update:1"]
    assert (await world.client.run(run_id)).step == 0
    assert await world.client.cancel(run_id, CancelRequest(actor="ann")) == view


async def test_an_alias_moved_meanwhile_is_not_moved_again(world: World) -> None:
    await world.until(await world.train(sft(steps=1)), "completed")
    await world.until(await world.train(sft(steps=1, promote_to=None), "request-2"), "completed")
    begun, go = asyncio.Event(), asyncio.Event()

    async def before(command: Any) -> None:
        begun.set()
        await go.wait()

    world.before = before
    run_id = await world.train(sft(steps=1), "request-3")
    await asyncio.wait_for(begun.wait(), 10)
    moved = await world.client.move_alias("acme/adder", "live", MoveAlias(revision="acme/adder@2", actor="ann"))
    assert (moved.version, moved.previous) == (2, "acme/adder@1")
    go.set()
    run = await world.until(run_id, "completed", "failed")
    assert run.outcome == "not promoted: alias moved by ann (manual to acme/adder@2, version 2)"


async def test_rollback_goes_back_and_forward(world: World) -> None:
    for number in (1, 2):
        await world.until(await world.train(sft(steps=1), f"request-{number}"), "completed")
    back = await world.client.rollback("acme/adder", Rollback(actor="ann"))
    assert (back.revision, back.previous, back.version) == ("acme/adder@1", "acme/adder@2", 3)
    assert (await world.client.resolve("acme/adder")).revision == "acme/adder@1"
    forward = await world.client.rollback("acme/adder", Rollback(actor="ann"))
    assert (forward.revision, forward.version) == ("acme/adder@2", 4)
    moves = await world.client.moves("acme/adder")
    assert [(m.version, m.reason) for m in moves] == [
        (1, "promotion"), (2, "promotion"), (3, "rollback"), (4, "rollback"),
    ]  # fmt: skip


async def test_rollback_to_what_cannot_be_loaded_leaves_the_alias(world: World) -> None:
    for number in (1, 2):
        await world.until(await world.train(sft(steps=1), f"request-{number}"), "completed")
    world.deaf = True
    await world.announce(world.catalog_bus, [])
    await asyncio.sleep(0.3)
    with pytest.raises(Refused, match="acme/adder@1 is ready on 0 of 1") as refused:
        await world.client.rollback("acme/adder", Rollback(actor="ann", timeout_s=0.5))
    assert (refused.value.status, refused.value.code) == (409, "not_ready")
    assert (await world.client.policy("acme/adder")).aliases == {"live": "acme/adder@2"}
    forced = await world.client.rollback("acme/adder", Rollback(actor="ann", force=True))
    assert (forced.revision, forced.version) == ("acme/adder@1", 3)
    assert (await world.client.moves("acme/adder"))[-1].reason == "rollback, forced"


async def test_a_revision_that_no_engine_loads_fails_its_run(world: World) -> None:
    """aibrix#1860: bad files end as failed with the reason, never as a run that hangs."""
    world.broken["acme/adder@1"] = "0 of 14 modules applied"
    run = await world.until(await world.train(grpo()), "failed")
    assert "acme/adder@1 could not be loaded for serving: 0 of 14 modules applied" in run.outcome


async def test_a_bus_that_restarts_gets_everything_in_order(
    tmp_path: Path, make_bus: Callable[[], Bus], nats_server: NatsServer
) -> None:
    async with open_world(tmp_path, make_bus, drive_every_s=1.0) as world:
        await world.start_workers()
        await world.start_replica()
        run_id = await world.train(grpo(steps=3))
        await eventually(lambda: "update:1" in world.jobs)
        await asyncio.to_thread(nats_server.kill)
        second = await world.client.runs()
        assert second.items[0].state == "running"
        await asyncio.sleep(0.5)
        await asyncio.to_thread(nats_server.start)
        run = await world.until(run_id, "completed", "failed", timeout_s=60)
        assert run.state == "completed", run.outcome
        assert (await world.client.policy("acme/adder")).revisions == 3
        await eventually(partial(_told, world, "run.completed"))
        facts = _facts(await world.messages("EVENTS"))
        states = [fact for fact in facts if fact.startswith(("run.", "revision.registered"))]
        assert states == [
            "run.queued", "run.running", *["revision.registered"] * 3, "run.promoting", "run.completed",
        ]  # fmt: skip


async def test_a_catalog_that_restarts_goes_on_where_it_was(tmp_path: Path, make_bus: Callable[[], Bus]) -> None:
    async with open_world(tmp_path, make_bus) as world:
        run_id = await world.train(sft(steps=2))
        await world.until(run_id, "running")
        await world.stop_catalog()
        await world.start_catalog()
        await world.start_workers()
        await world.start_replica()
        run = await world.until(run_id, "completed", "failed")
        assert run.state == "completed", run.outcome
        assert await _desired(world) == [("acme/adder@1", False)]


async def _desired(world: World) -> list[tuple[str, bool]]:
    """What is desired once no run needs it; it is written right after the transaction that ended the run."""
    entries: list[dict[str, Any]] = []
    async with asyncio.timeout(10):
        while not entries or any(entry["keep"] for entry in entries):
            found = await world.catalog_bus.kv("residency").get("tiny-llama")
            entries = json.loads(found.value or b"")["entries"] if found is not None else []
            await asyncio.sleep(0.05)
    return [(entry["revision"], entry["keep"]) for entry in entries]


async def test_search_shows_aliases(world: World) -> None:
    """mlflow#16734: an alias that was set is seen in search and in get."""
    await world.until(await world.train(sft(steps=1)), "completed")
    listed = await world.client.policies()
    assert listed.items[0].aliases == {"live": "acme/adder@1"}
    revisions = await world.client.revisions("acme/adder")
    assert revisions.items[0].aliases == ("live",)
    assert revisions.items[0].ready_on == ("r1",)
    assert (await world.client.revision("acme/adder@1")).aliases == ("live",)
