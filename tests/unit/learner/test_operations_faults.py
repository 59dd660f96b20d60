"""Operations that fail: with whose fault, in whose words, and what is left as it was."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mint_schemas.training import Lora

from services.learner.heads import LossCall
from services.learner.slots import Slot
from shared.operations.payload import (
    AdamPayload,
    Row,
    TrainPayload,
)
from shared.store.memory import MemoryStore
from tests.unit.learner.operation_runs import files_of, steps, uninterrupted
from tests.unit.learner.operation_world import (
    ADAM,
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


def _changed(row: Row, **inputs: Any) -> Row:
    return dataclasses.replace(row, inputs={**row.inputs, **inputs})


def _bad(fault: str) -> TrainPayload:
    good = rows(1)
    second = good[1]
    ones = np.ones(len(second.tokens), np.float32)
    without = {name: array for name, array in second.inputs.items() if name != "weights"}
    made = {
        "loss": TrainPayload(good, "stable_reinforce"),
        "setting": TrainPayload(good, "cross_entropy", {"beta": 1.0}),
        "missing": TrainPayload(tuple(dataclasses.replace(r, inputs={
            name: array for name, array in r.inputs.items() if name != "weights"}) for r in good), "cross_entropy"),
        "uneven": TrainPayload((good[0], dataclasses.replace(second, inputs=without)), "cross_entropy"),
        "length": TrainPayload((good[0], _changed(second, weights=ones[:-1])), "cross_entropy"),
        "targets": TrainPayload(
            (good[0], dataclasses.replace(second, tokens=second.tokens[:-1])), "cross_entropy"
        ),
        "vocabulary": TrainPayload(
            (good[0], _changed(second, target_tokens=np.full(len(ones), 49152, np.int64))), "cross_entropy"
        ),
        "negative": TrainPayload((dataclasses.replace(good[0], tokens=-good[0].tokens), second), "cross_entropy"),
        "nan": TrainPayload((good[0], _changed(second, weights=ones * np.nan)), "cross_entropy"),
        "long": TrainPayload(rows(1, (5, 1025)), "cross_entropy"),
        "empty": TrainPayload((), "cross_entropy"),
        "dtype": TrainPayload((good[0], _changed(second, target_tokens=ones)), "cross_entropy"),
        "wide": TrainPayload(
            tuple(_changed(r, logprobs=r.inputs["weights"], advantages=r.inputs["weights"]) for r in rows(1, wide=2)),
            "ppo",
        ),
        "infinite": TrainPayload(
            tuple(
                Row(r.tokens, {"target_tokens": r.inputs["target_tokens"],
                               "logprobs": np.full(len(r.tokens), -1000.0, np.float32),
                               "advantages": np.ones(len(r.tokens), np.float32)})
                for r in good
            ),
            "importance_sampling",
        ),
    }  # fmt: skip
    return made[fault]


FAULTS = {
    "loss": "unknown loss 'stable_reinforce'; known are cross_entropy",
    "setting": "loss cross_entropy has no setting beta",
    "missing": "row 0: the loss needs weights",
    "uneven": "row 1: ",
    "length": "row 1: weights has shape [4], target_tokens [5]",
    "targets": "row 1: target_tokens has length 5, the input 4",
    "vocabulary": "row 1: token id 49152 is outside the vocabulary of 49152",
    "negative": "is outside the vocabulary of 49152",
    "nan": "row 1: weights holds a number that is not finite",
    "long": "row 1: 1025 tokens; a row has 1 to 1024",
    "empty": "the batch is empty",
    "dtype": "row 1: target_tokens is float32; token ids are int64",
    "wide": "row 0: target_tokens has shape [9, 2]; ppo takes [T], one target a position",
    "infinite": "its loss is -inf",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["forward", "forward_backward"])
async def test_what_a_caller_got_wrong_is_its_failure_with_the_row_and_the_next_goes_on(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore, fault: str, kind: Any
) -> None:
    """Between two passes of one step: its gradients are as if it had not been there."""
    model, process = catalog.model(), learner()
    await catalog.submit(model, "forward_backward", train(0))
    bad = await catalog.submit(model, kind, _bad(fault))
    await catalog.submit(model, "forward_backward", train(1))
    await catalog.submit(model, "optim_step", ADAM)
    await process.drain()
    failure = catalog.failure(model, bad)
    assert failure.category == "user"
    assert FAULTS[fault] in failure.message
    assert process.loaded == []
    assert (await files_of(store, model.start)) == await uninterrupted(learner, store, range(1))


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (ADAM, "an optimizer step needs a forward_backward before it"),
        (AdamPayload(learning_rate=-1.0), "learning_rate is -1.0; it must be at least 0 and below 1e+30"),
        (AdamPayload(eps=1e300), "eps is 1e+300; it must be at least 0 and below 1e+30"),
        (AdamPayload(1e20, weight_decay=1e20), "learning_rate · weight_decay is 1e+40; it must be"),
        (AdamPayload(beta2=1.0), "beta2 is 1.0; it must be at least 0 and below 1"),
    ],
)
async def test_an_optimizer_step_that_cannot_be_is_its_callers_failure(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore, payload: AdamPayload, reason: str
) -> None:
    model = catalog.model()
    bad = await catalog.submit(model, "optim_step", payload)
    await steps(catalog, model, range(1))
    await learner().drain()
    assert (catalog.failure(model, bad).category, model.step) == ("user", 1)
    assert reason in catalog.failure(model, bad).message
    assert (await files_of(store, model.start)) == await uninterrupted(learner, store, range(1))


async def test_a_step_that_makes_weights_that_are_not_finite_is_refused_and_undone(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore
) -> None:
    """Without eps, what has no gradient is 0/0. The gradients are still there for another step."""
    model = catalog.model()
    for part in range(2):
        await catalog.submit(model, "forward_backward", train(part))
    bad = await catalog.submit(model, "optim_step", dataclasses.replace(ADAM, eps=0.0))
    await catalog.submit(model, "optim_step", ADAM)
    await learner().drain()
    assert "weights that are not finite" in catalog.failure(model, bad).message
    assert (await files_of(store, model.start)) == await uninterrupted(learner, store, range(1))


async def test_trouble_that_is_nobodys_fault_is_tried_again_and_then_the_servers(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore
) -> None:
    model, process = catalog.model(), learner()
    await steps(catalog, model, range(1))
    trainer = process.bench._trainer
    good, met = trainer.forward_backward, []

    def broken(slot: Slot, data: Any, call: LossCall, check: Any) -> Any:
        met.append(data)
        raise RuntimeError("no memory left")

    trainer.forward_backward = broken  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no memory left"):
            await process.drain()
    assert len(met) == 3
    assert all("no memory left" in release.failure for release in catalog.releases)
    trainer.forward_backward = good  # type: ignore[method-assign]
    await process.drain()
    failure = catalog.failure(model, model.operations[0].request_id)
    assert failure.category == "server"
    assert "tried 3 times; the last time: RuntimeError: no memory left" in failure.message
    assert model.step == 1, "the operations behind it went on"


async def test_one_policys_failures_leave_the_others_alone(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore
) -> None:
    process = learner()
    good, bad = catalog.model("acme/tinker-a"), catalog.model("acme/tinker-b", Lora(rank=64, alpha=32.0))
    await steps(catalog, good, range(2))
    failing = await catalog.submit(bad, "forward_backward", train(0))
    await asyncio.gather(process.drain(good.policy), process.drain(bad.policy))
    assert "rank 64 is more than this learner's 32" in catalog.failure(bad, failing).message
    assert (await files_of(store, good.start)) == await uninterrupted(learner, store, range(2))
