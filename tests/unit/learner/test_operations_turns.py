"""Policies of events and of operations at one base: they share its turns, and what they compute is their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mint_schemas.cloudevents import Envelope

from services.learner import operations
from services.learner.step import UpdateJob
from services.learner.workbench import Schedule
from shared.bus import Received
from shared.catalog import operations as ops
from shared.errors import Fatal, Retryable
from shared.store.memory import MemoryStore
from tests.unit.learner.jobs import digests, make_job, run
from tests.unit.learner.operation_world import ADAM, Catalog, Learner, Model, train


async def _operations(catalog: Catalog, model: Model, steps: int) -> None:
    for number in range(steps):
        await catalog.submit(model, "forward_backward", train(number))
        await catalog.submit(model, "optim_step", ADAM)


def _until(met: Callable[[], bool]) -> None:
    for _ in range(3000):
        if met():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


@pytest.mark.parametrize("schedule", ["sliced", "batched"])
async def test_steps_of_events_and_operations_take_turns_and_have_the_bytes_that_they_have_alone(
    tiny_directory: Path, store: MemoryStore, schedule: Any
) -> None:
    catalog = Catalog(store)
    model = catalog.model()
    await _operations(catalog, model, 3)
    process = Learner(tiny_directory, catalog, store, schedule=Schedule(schedule))
    seen: list[str] = []
    steps = process.bench.turns._work

    def noting(requests: Any) -> Any:
        if not seen:  # the first turn lasts until somebody waits for the next
            _until(lambda: bool(process.bench.turns._queue))
        seen.append("+".join(type(request).__name__ for request in requests))
        return steps(requests)

    process.bench.turns._work = noting
    job = UpdateJob({process.bench.base.name: process.bench}, store)
    event, _ = await asyncio.gather(run(job, store, 1, 2, 3), process.drain())
    assert set(seen) == {"StepRequest", "OperationRequest"}, "a turn is of one kind"
    assert seen != sorted(seen), "neither waited until the other was done"
    assert seen != sorted(seen, reverse=True)

    quiet = Catalog(store)
    alone = quiet.model()
    await _operations(quiet, alone, 3)
    await Learner(tiny_directory, quiet, store).drain()
    assert model.start is not None
    assert alone.start is not None
    assert digests(model.start) == digests(alone.start)
    wanted = await run(make_job(tiny_directory, store), store, 1, 2, 3)
    assert digests(event.checkpoint) == digests(wanted.checkpoint)


async def test_a_policy_is_in_one_hand_at_a_time(tiny_directory: Path, store: MemoryStore) -> None:
    """Two messages about it in one process."""
    catalog = Catalog(store)
    model = catalog.model()
    await _operations(catalog, model, 2)
    process = Learner(tiny_directory, catalog, store)
    await asyncio.gather(process.drain(), process.drain())
    assert [commit.request_id for commit in catalog.commits] == [o.request_id for o in model.operations]
    assert model.epoch == 1


async def test_a_policy_that_is_never_idle_gives_the_others_a_turn(
    tiny_directory: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message is done after so many grants; the lease that it gives back brings another one."""
    monkeypatch.setattr("services.learner.operations.GRANTS", 2)
    catalog = Catalog(store)
    catalog.limit = 1
    model = catalog.model()
    await _operations(catalog, model, 2)
    process = Learner(tiny_directory, catalog, store)
    await process.drain()
    assert len(model.waiting) == 2
    assert model.worker is None
    assert [release.failure for release in catalog.releases] == [""]
    await process.drain()
    assert model.step == 2
    assert process.loaded == []


async def test_a_busy_policy_is_left_to_its_learner(tiny_directory: Path, store: MemoryStore) -> None:
    catalog = Catalog(store)
    model = catalog.model()
    await _operations(catalog, model, 1)
    catalog.lose_lease(model)
    with pytest.raises(Retryable, match="another learner works on acme/tinker-a") as busy:
        await Learner(tiny_directory, catalog, store).drain()
    assert busy.value.delay_s == 0.2
    assert not catalog.commits


async def test_a_stopped_learner_gives_its_lease_back_at_once(tiny_directory: Path, store: MemoryStore) -> None:
    catalog = Catalog(store)
    model = catalog.model()
    await _operations(catalog, model, 1)
    process = Learner(tiny_directory, catalog, store)
    entered = asyncio.Event()
    commit = catalog.commit

    async def stuck(request: Any) -> Any:
        entered.set()
        await asyncio.Event().wait()
        return await commit(request)

    catalog.commit = stuck  # type: ignore[method-assign]
    task = asyncio.create_task(process.drain())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert model.worker is None
    assert [release.failure for release in catalog.releases] == [""]


async def test_a_message_about_another_base_is_refused_by_name(tiny_directory: Path, store: MemoryStore) -> None:
    process = Learner(tiny_directory, Catalog(store), store)
    envelope = Envelope(type="mint.v1.operations.requested", source="mint/catalog", id="x", time="")
    message = Received(envelope, b'{"policy": "acme/tinker-a", "base": "other/base"}', "other", "s", 1, {})
    with pytest.raises(Fatal, match="this learner has no base 'other/base'; it holds tiny/llama"):
        await process.operations.handle(message)


async def test_the_lease_that_is_given_back_is_the_one_that_was_granted_last(
    tiny_directory: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs out right behind the last grant that a policy has in one go, and is granted anew."""
    monkeypatch.setattr(operations, "GRANTS", 1)

    class Late(Catalog):
        async def take(self, request: ops.TakeOperations) -> ops.OperationsTaken:
            if request.epoch:
                self.models[request.policy].worker = None
            return await super().take(request)

    catalog = Late(store)
    catalog.limit = 1
    model = catalog.model()
    await _operations(catalog, model, 1)
    await Learner(tiny_directory, catalog, store).drain()
    assert model.epoch == 2
    assert model.worker is None, "nobody else could go on before the lease runs out"


async def test_what_a_slot_still_holds_is_not_sent_again_for_the_next_message(
    tiny_directory: Path, store: MemoryStore
) -> None:
    """A client that waits for each pass, and steps seldom: each message begins with a take."""
    sent: list[int] = []

    class Counting(Catalog):
        async def take(self, request: ops.TakeOperations) -> ops.OperationsTaken:
            taken = await super().take(request)
            sent.append(sum(operation.payload != ops.Content() for operation in taken.replay))
            return taken

    catalog = Counting(store)
    model, process = catalog.model(), Learner(tiny_directory, catalog, store)
    for number in range(4):
        await catalog.submit(model, "forward_backward", train(number))
        await process.drain()
    assert sum(sent) == 0
    assert len(model.replay) == 4

    process.bench._slots.drop(model.policy)
    await catalog.submit(model, "optim_step", ADAM)
    await process.drain()
    assert sum(sent) == 4
    assert model.step == 1
