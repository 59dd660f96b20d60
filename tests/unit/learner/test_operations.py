"""Operations of models: the bytes they give, whoever is killed or evicted on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load

from services.learner.optimizer import AdamParams
from services.learner.slots import Slot
from shared.errors import Retryable
from shared.store.memory import MemoryStore
from tests.unit.learner.operation_runs import ADAPTER, OPTIMIZER, files_of, primitives, steps, uninterrupted
from tests.unit.learner.operation_world import (
    ADAM,
    Catalog,
    Killed,
    Learner,
    lost_answer,
    train,
)

STEPS = 5


@pytest.fixture
def catalog(store: MemoryStore) -> Catalog:
    return Catalog(store)


@pytest.fixture
def learner(tiny_directory: Path, catalog: Catalog, store: MemoryStore) -> Callable[..., Learner]:
    """A process as after its start."""
    return lambda at=catalog, **settings: Learner(tiny_directory, at, store, **settings)


async def test_five_steps_give_the_bytes_that_the_primitives_of_the_event_path_give(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore
) -> None:
    """Adapter and moments; equal batches, one thread."""
    model, process = catalog.model(), learner()
    await steps(catalog, model, range(STEPS))
    await process.drain()
    files = await files_of(store, model.start)
    slot = primitives(learner().bench, range(STEPS))
    adapter, moments = load(files[ADAPTER]), load(files[OPTIMIZER])
    assert adapter.keys() == slot.parameters.keys()
    for name, parameter in slot.parameters.items():
        assert adapter[name].tobytes() == parameter.detach().numpy().tobytes()
        assert moments[f"{name}.m1"].tobytes() == slot.optimizer.first[name].numpy().tobytes()
        assert moments[f"{name}.m2"].tobytes() == slot.optimizer.second[name].numpy().tobytes()
    assert model.step == slot.optimizer.step_count == STEPS
    assert [release.failure for release in catalog.releases] == [""]
    assert model.worker is None


async def test_a_slot_that_holds_the_state_is_not_restored(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore
) -> None:
    """One lease after another, with gradients open in between."""
    model, process = catalog.model(), learner()
    for number in range(3):
        for part in range(2):
            await catalog.submit(model, "forward_backward", train(10 * number + part))
            await process.drain()
        await catalog.submit(model, "optim_step", ADAM)
        await process.drain()
    assert process.loaded == []
    assert (await files_of(store, model.start)) == await uninterrupted(learner, store, range(3))


@pytest.mark.parametrize("committed", [0, 1, 2, 3, 4, 5])
async def test_a_learner_killed_before_any_commit_is_followed_by_one_that_gives_the_same_bytes(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore, committed: int
) -> None:
    """Killed with the files written; the results that were visible stay as they were."""
    model = catalog.model()
    await steps(catalog, model, range(2))
    catalog.before = [*[None] * committed, Killed()]
    with pytest.raises(Killed):
        await learner().drain()
    seen = dict(model.views)
    assert len(seen) == committed
    model.worker = None
    await learner(worker="next").drain()
    assert {name: model.views[name] for name in seen} == seen
    assert [commit.request_id for commit in catalog.commits] == [o.request_id for o in model.operations]
    assert (await files_of(store, model.start)) == await uninterrupted(learner, store, range(2))


async def test_a_learner_killed_after_the_row_does_not_make_the_step_again(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore
) -> None:
    """SkyRL#2035: a step whose answer was lost is made again."""
    model = catalog.model()
    await steps(catalog, model, range(2))
    catalog.after = [None, None, Killed()]
    with pytest.raises(Killed):
        await learner().drain()
    assert model.step == 1
    model.worker = None
    await learner(worker="next").drain()
    assert (await files_of(store, model.start)) == await uninterrupted(learner, store, range(2))


async def test_an_answer_lost_on_the_way_is_asked_for_again(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.worker.answered.PAUSES_S", (0.0, 0.0))
    model, process = catalog.model(), learner()
    await steps(catalog, model, range(2))
    catalog.after = [None, lost_answer(), None, lost_answer(), lost_answer()]
    await process.drain()
    assert [commit.request_id for commit in catalog.commits] == [o.request_id for o in model.operations]
    assert process.loaded == []
    assert (await files_of(store, model.start)) == await uninterrupted(learner, store, range(2))


async def test_a_catalog_that_stays_away_gives_the_work_back_uncounted(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.worker.answered.PAUSES_S", (0.0,))
    model, process = catalog.model(), learner()
    await steps(catalog, model, range(1))
    catalog.before = [lost_answer(), lost_answer()]
    with pytest.raises(Retryable, match="does not answer"):
        await process.drain()
    assert [release.failure for release in catalog.releases] == [""]
    await process.drain()
    assert (await files_of(store, model.start)) == await uninterrupted(learner, store, range(1))


async def test_a_lost_lease_commits_nothing_and_whoever_has_it_goes_on(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore
) -> None:
    """Lost while an optimizer step is computed."""
    model, process = catalog.model(), learner()
    await steps(catalog, model, range(1))
    trainer = process.bench._trainer
    optim_step = trainer.optim_step

    def losing(slot: Slot, params: AdamParams) -> float:
        catalog.lose_lease(model)
        return optim_step(slot, params)

    trainer.optim_step = losing  # type: ignore[method-assign]
    with pytest.raises(Retryable, match="stale_epoch"):
        await process.drain()
    assert len(catalog.commits) == 2
    assert model.start is None
    with pytest.raises(Retryable, match="another learner works on acme/tinker-a"):
        await process.drain()
    model.worker = None
    trainer.optim_step = optim_step  # type: ignore[method-assign]
    await process.drain()
    assert (await files_of(store, model.start)) == await uninterrupted(learner, store, range(1))


@pytest.mark.parametrize("limit", [1, 32])
async def test_policies_that_share_one_slot_have_the_bytes_that_they_have_alone(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore, limit: int
) -> None:
    """Each is evicted with gradients open, again and again; with one operation a grant also between a grant that saw
    its slot hold the state and its turn. open-rl#80: one policy's step touches another."""
    process = learner(capacity=1)
    catalog.limit = limit
    models = [catalog.model(f"acme/tinker-{name}") for name in "ab"]
    for model in models:
        await steps(catalog, model, range(2))
    while any(model.waiting for model in models):
        await asyncio.gather(*(process.drain(model.policy) for model in models))
    assert set(process.loaded) == {model.policy for model in models}
    wanted = await uninterrupted(learner, store, range(2))
    for model in models:
        files = await files_of(store, model.start)
        assert {name: files[name] for name in (ADAPTER, OPTIMIZER)} == {
            name: wanted[name] for name in (ADAPTER, OPTIMIZER)
        }
        assert [commit.request_id for commit in catalog.commits if commit.policy == model.policy] == [
            operation.request_id for operation in model.operations
        ]
