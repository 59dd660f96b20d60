"""What operations answer: logprobs and losses, one target a position or several, inline or as a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from services.learner.datum import Datum
from services.learner.heads import LossCall
from services.learner.one_step import shape_of_lora
from services.learner.operation_rows import datums
from services.learner.slots import Slot
from shared.operations.payload import (
    Row,
    StepResult,
    TrainPayload,
    TrainResult,
)
from shared.rl.seeds import derive_seed
from shared.store.memory import MemoryStore
from tests.unit.learner.batches import go_on
from tests.unit.learner.operation_runs import ADAPTER, files_of, primitives, steps
from tests.unit.learner.operation_world import (
    ADAM,
    LORA,
    Catalog,
    Learner,
    rows,
    train,
)


@pytest.fixture
def catalog(store: MemoryStore) -> Catalog:
    return Catalog(store)


@pytest.fixture
def learner(tiny_directory: Path, catalog: Catalog, store: MemoryStore) -> Callable[..., Learner]:
    """A process as after its start."""
    return lambda at=catalog, **settings: Learner(tiny_directory, at, store, **settings)


async def test_forward_has_the_logprobs_and_the_loss_of_forward_backward_and_changes_nothing(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore
) -> None:
    model = catalog.model()
    first = await catalog.submit(model, "forward", train(0))
    made = await steps(catalog, model, range(1), passes=1)
    await learner().drain()
    forward, backward = await catalog.result(model, first), await catalog.result(model, made[0])
    assert isinstance(forward, TrainResult)
    assert isinstance(backward, TrainResult)
    payload = train(0)
    for row, ours, theirs in zip(payload.rows, forward.logprobs, backward.logprobs, strict=True):
        assert ours.dtype == np.float32
        assert ours.shape == row.inputs["target_tokens"].shape
        assert np.array_equal(ours, theirs)
    wanted = -sum(
        float(np.dot(row.inputs["weights"], lp)) for row, lp in zip(payload.rows, forward.logprobs, strict=True)
    )
    assert forward.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-5)
    assert backward.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-5)
    slot = primitives(learner().bench, range(1), passes=1)
    adapter = load((await files_of(store, model.start))[ADAPTER])
    assert all(adapter[name].tobytes() == p.detach().numpy().tobytes() for name, p in slot.parameters.items())
    step = await catalog.result(model, made[1])
    assert isinstance(step, StepResult)
    assert step.metrics["grad_norm:mean"] > 0
    assert catalog.commits[-1].metrics["learning_rate"] == ADAM.learning_rate


async def test_large_results_are_files_and_small_ones_are_not(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore
) -> None:
    model = catalog.model()
    names = [
        await catalog.submit(model, "forward", TrainPayload(rows(0, lengths), "cross_entropy"))
        for lengths in ((9,), (1000,) * 9)
    ]
    await learner(max_tokens=1024).drain()
    small, large = (model.views[name].result for name in names)
    assert small is not None
    assert small.inline is not None
    assert small.file is None
    assert large is not None
    assert large.inline is None
    assert large.file is not None
    assert large.file.key == f"blobs/sha256/{large.file.sha256}"
    assert (await catalog.result(model, names[1])).logprobs[8].shape == (1000,)


async def test_several_targets_a_position_are_the_sum_over_them(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore
) -> None:
    """Rows with 3, 2 and 1 targets: losses, logprobs and gradients are those of one pass for each."""
    three, two, one = rows(4, (9,), wide=3)[0], rows(5, (5,), wide=2)[0], rows(6, (12,))[0]
    model, process = catalog.model(), learner()
    name = await catalog.submit(model, "forward_backward", TrainPayload((three, two, one), "cross_entropy"))
    await process.drain()
    result = await catalog.result(model, name)
    assert [array.shape for array in result.logprobs] == [(9, 3), (5, 2), (12,)]

    slot: Slot = process.bench._slots.acquire("acme/alone", shape_of_lora(LORA))
    slot.initialise(derive_seed(7, "adapter-init"))
    total = 0.0
    for row, found in zip((three, two), result.logprobs, strict=False):
        for column in range(found.shape[1]):
            its = Row(row.tokens, {key: array[:, column].copy() for key, array in row.inputs.items()})
            answer = process.bench._trainer.forward_backward(
                slot, datums(TrainPayload((its,), "cross_entropy")), LossCall("cross_entropy"), go_on
            )
            total += answer.loss
            assert np.allclose(answer.logprobs[0], found[:, column], atol=1e-5)
    data: list[Datum] = datums(TrainPayload((one,), "cross_entropy"))
    total += process.bench._trainer.forward_backward(slot, data, LossCall("cross_entropy"), go_on).loss
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    held = process.bench._slots.acquire(model.policy, shape_of_lora(LORA))
    assert np.allclose(held.flat_gradients.numpy(), slot.flat_gradients.numpy(), rtol=1e-4, atol=1e-5)
    assert float(np.abs(slot.flat_gradients.numpy()).max()) > 1e-2
