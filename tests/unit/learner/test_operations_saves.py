"""Weights saved and loaded by operations: what is in them, and what comes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load

from shared.operations.payload import (
    LoadPayload,
    SavedResult,
    SavePayload,
)
from shared.store.memory import MemoryStore
from tests.unit.learner.operation_runs import ADAPTER, GRADIENTS, OPTIMIZER, files_of, steps, uninterrupted
from tests.unit.learner.operation_world import (
    ADAM,
    LORA,
    Catalog,
    Learner,
    train,
)


@pytest.fixture
def catalog(store: MemoryStore) -> Catalog:
    return Catalog(store)


@pytest.fixture
def learner(tiny_directory: Path, catalog: Catalog, store: MemoryStore) -> Callable[..., Learner]:
    """A process as after its start."""
    return lambda at=catalog, **settings: Learner(tiny_directory, at, store, **settings)


async def test_saved_weights_have_the_open_gradients_and_are_continued_to_the_same_bytes(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore
) -> None:
    model, process = catalog.model(), learner()
    await steps(catalog, model, [0])
    await catalog.submit(model, "forward_backward", train(10))
    saved = await catalog.submit(model, "save_weights", SavePayload("weights", name="half"))
    await process.drain()
    reference = model.checkpoints[saved]
    assert reference.step == 1
    assert reference.files.keys() == {ADAPTER, OPTIMIZER, GRADIENTS, "state.json"}
    result = await catalog.result(model, saved)
    assert result == SavedResult(path=f"tinker://s:train:{model.policy}/weights/half")

    other = catalog.model("acme/tinker-b", seed=99)
    loaded = await catalog.submit(
        other, "load_weights", LoadPayload("tinker://x/weights/half", optimizer=True), reference=reference,
        has_optimizer=True,
    )  # fmt: skip
    await catalog.submit(other, "forward_backward", train(11))
    await catalog.submit(other, "optim_step", ADAM)
    await learner().drain(other.policy)
    assert (await catalog.result(other, loaded)) == SavedResult(path="tinker://x/weights/half")
    assert other.checkpoints[loaded].step == 1
    files, wanted = await files_of(store, other.start), await uninterrupted(learner, store, range(2))
    assert (files[ADAPTER], files[OPTIMIZER]) == (wanted[ADAPTER], wanted[OPTIMIZER])


@pytest.mark.parametrize(("asked", "kept"), [(False, True), (True, False)])
async def test_loaded_without_its_optimizer_it_starts_with_fresh_moments(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore, asked: bool, kept: bool
) -> None:
    """Not asked for, or not kept: then the answer says so."""
    model, process = catalog.model(), learner()
    await steps(catalog, model, [0])
    await catalog.submit(model, "forward_backward", train(5))
    await process.drain()
    before = await files_of(store, model.start)
    load_it = LoadPayload("tinker://x/weights/a", optimizer=asked)
    loaded = await catalog.submit(model, "load_weights", load_it, reference=model.start, has_optimizer=kept)
    bare = await catalog.submit(model, "optim_step", ADAM)
    await process.drain()
    files = await files_of(store, model.start)
    assert files[ADAPTER] == before[ADAPTER]
    assert all(not array.any() for array in load(files[OPTIMIZER]).values())
    assert "needs a forward_backward" in catalog.failure(model, bare).message, "its gradients went with the state"
    assert bool((await catalog.result(model, loaded)).note) is (asked and not kept)


async def test_weights_of_another_shape_are_refused_and_the_state_stays(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore
) -> None:
    other = catalog.model("acme/tinker-b", LORA.model_copy(update={"rank": 2}))
    await steps(catalog, other, [3])
    process = learner()
    await process.drain(other.policy)
    model = catalog.model()
    await catalog.submit(model, "forward_backward", train(0))
    bad = await catalog.submit(model, "load_weights", LoadPayload("tinker://x/weights/a"), reference=other.start)
    await catalog.submit(model, "forward_backward", train(1))
    await catalog.submit(model, "optim_step", ADAM)
    await process.drain()
    failure = catalog.failure(model, bad)
    assert failure.category == "user"
    assert "they must be equal" in failure.message
    assert (await files_of(store, model.start)) == await uninterrupted(learner, store, range(1))


async def test_weights_for_a_sampler_have_the_probe_of_the_state(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore
) -> None:
    model = catalog.model()
    fresh = await catalog.submit(model, "save_sampler_weights", SavePayload("sampler_weights", name="zero"))
    await steps(catalog, model, [0])
    saved = await catalog.submit(
        model, "save_sampler_weights", SavePayload("sampler_weights", sampling_session_seq_id=1)
    )
    await learner().drain()
    probes = [(await files_of(store, model.checkpoints[name]))["probe.json"] for name in (fresh, saved)]
    assert probes[0] != probes[1]
    assert [model.checkpoints[name].step for name in (fresh, saved)] == [0, 1]
    assert (await files_of(store, model.checkpoints[saved]))[ADAPTER] == (await files_of(store, model.start))[ADAPTER]
