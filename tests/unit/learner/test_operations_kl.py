"""Reverse KL as an operation: rows laid end to end, a reference in a slot of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.learner.one_step import shape_of_lora
from services.learner.operation_rows import adam_params, kl_rows
from services.learner.slots import Slot
from shared.errors import Fatal
from shared.operations.payload import ReverseKlResult
from shared.rl.seeds import derive_seed
from shared.store.memory import MemoryStore
from tests.unit.learner.batches import go_on
from tests.unit.learner.operation_world import ADAM, LORA, Catalog, Learner, kl_payload, kl_row, train

OTHER = LORA.model_copy(update={"rank": 2, "target_modules": ("down_proj",)})
TEMPERATURE = 0.7


@pytest.fixture
def catalog(store: MemoryStore) -> Catalog:
    return Catalog(store)


@pytest.fixture
def learner(tiny_directory: Path, catalog: Catalog, store: MemoryStore) -> Callable[..., Learner]:
    return lambda **settings: Learner(tiny_directory, catalog, store, **settings)


def test_rows_are_laid_end_to_end() -> None:
    (found,) = kl_rows(kl_payload(kl_row(0)))
    assert [i for i, taken in enumerate(found.student_mask) if taken] == [2, 3, 4, 5, 6]
    assert [i for i, taken in enumerate(found.reference_mask) if taken] == [5, 6, 7, 8, 9]
    (found,) = kl_rows(kl_payload(kl_row(0, student_prompt=6, reference_prompt=3)))
    assert [i for i, taken in enumerate(found.reference_mask) if taken] == [2, 3, 4, 5, 6]


def test_a_row_of_weights_zero_has_a_loss_of_zero_and_still_a_position() -> None:
    (found,) = kl_rows(kl_payload(kl_row(0, weights=np.zeros(7, np.float32))))
    assert sum(found.student_mask) == sum(found.reference_mask) == 1
    assert not any(found.weights)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weights": np.ones(3, np.float32)}, "row 1: weights has length 3, student_input 7"),
        ({"target_tokens": np.ones(9, np.int64)}, "row 1: target_tokens has length 9, student_input 7"),
        ({"reference_input": np.arange(3, 13)}, "row 1: after position 2 student_input goes on with"),
        ({"reference_input": np.arange(3, 5)}, "row 1: position 2 has a weight, but reference_input is 5 tokens"),
        ({"student_input": np.ones((7, 1), np.int64)}, "row 1: student_input has shape"),
        ({"student_input": np.ones(7, np.float32)}, "row 1: student_input is float32; token ids are int64"),
    ],
)
def test_rows_that_do_not_end_alike_are_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Fatal) as refused:
        kl_rows(kl_payload(kl_row(0), kl_row(1, **changes)))
    assert reason in str(refused.value)


def test_a_temperature_that_is_none_is_refused() -> None:
    with pytest.raises(Fatal, match="temperature is 0"):
        kl_rows(kl_payload(kl_row(0), temperature=0.0))


async def test_it_is_the_trainers_reverse_kl_and_its_gradients_are_replayed(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore
) -> None:
    """A reference of another shape; the second process has neither slot."""
    teacher = catalog.model("acme/tinker-t", OTHER, seed=3)
    await catalog.submit(teacher, "forward_backward", train(5))
    await catalog.submit(teacher, "optim_step", ADAM)
    process = learner(capacity=5)
    await process.drain(teacher.policy)

    model, rows = catalog.model(), (kl_row(0), kl_row(1, answer=3))
    about = {"reference": teacher.start, "reference_lora": OTHER}
    names = [await catalog.submit(model, "reverse_kl", kl_payload(*rows), **about) for _ in range(2)]
    await process.drain()
    result = await catalog.result(model, names[0])
    assert result == await catalog.result(model, names[1])
    assert isinstance(result, ReverseKlResult)

    trainer, slots = process.bench._trainer, process.bench._slots
    slot: Slot = slots.acquire("acme/alone", shape_of_lora(LORA))
    slot.initialise(derive_seed(7, "adapter-init"))
    reference = slots.find(teacher.policy, shape_of_lora(OTHER))
    assert reference is not None
    for _ in range(2):
        wanted = trainer.reverse_kl(slot, reference, kl_rows(kl_payload(*rows)), TEMPERATURE, go_on)
    assert result.losses == tuple(wanted.losses)
    assert result.metrics == {"loss:sum": wanted.loss}
    assert wanted.loss > 0
    held = slots.find(model.policy, shape_of_lora(LORA))
    assert held is not None
    assert held.flat_gradients.equal(slot.flat_gradients)

    await catalog.submit(model, "optim_step", ADAM)
    other = learner(worker="other")
    await other.drain()
    assert model.step == 1
    replayed = other.bench._slots.find(model.policy, shape_of_lora(LORA))
    assert replayed is not None
    trainer.optim_step(held, adam_params(ADAM))
    assert replayed.flat.equal(held.flat)


async def test_two_references_in_turn_are_replayed_in_one_turn(
    learner: Callable[..., Learner], catalog: Catalog
) -> None:
    """The policy's slot is lost and its reference's is not, which holds the first reference and the last."""
    process = learner(capacity=4)
    teachers = [catalog.model(f"acme/tinker-t{seed}", seed=seed) for seed in (3, 4)]
    for number, teacher in enumerate(teachers):
        await catalog.submit(teacher, "forward_backward", train(5 + number))
        await catalog.submit(teacher, "optim_step", ADAM)
        await process.drain(teacher.policy)

    model = catalog.model()
    for teacher in (*teachers, teachers[0]):
        about = {"reference": teacher.start, "reference_lora": LORA}
        await catalog.submit(model, "reverse_kl", kl_payload(), **about)
    await process.drain()
    slots = process.bench._slots
    held = slots.find(model.policy, shape_of_lora(LORA))
    assert held is not None
    wanted = held.flat_gradients.clone()
    slots.drop(model.policy)

    forward = await catalog.submit(model, "forward", train(9))
    await process.drain()
    assert model.views[forward].state == "done"
    again = slots.find(model.policy, shape_of_lora(LORA))
    assert again is not None
    assert again.flat_gradients.equal(wanted)


async def test_a_learner_of_one_slot_says_what_it_lacks(
    learner: Callable[..., Learner], catalog: Catalog, store: MemoryStore
) -> None:
    teacher = catalog.model("acme/tinker-t")
    await catalog.submit(teacher, "forward_backward", train(5))
    await catalog.submit(teacher, "optim_step", ADAM)
    process = learner(capacity=1)
    await process.drain(teacher.policy)
    model = catalog.model()
    about = {"reference": teacher.start, "reference_lora": LORA}
    name = await catalog.submit(model, "reverse_kl", kl_payload(kl_row(0)), **about)
    for _ in range(3):
        with pytest.raises(Exception, match="MINT_LEARNER_SLOTS"):
            await process.drain()
    await process.drain()
    failure = catalog.failure(model, name)
    assert failure.category == "server"
    assert "set MINT_LEARNER_SLOTS to 2 or more" in failure.message
