"""Runs of operations that tests compare: whole ones, and the same steps by the primitives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mint_schemas.commands import CheckpointRef
from mint_schemas.training import Lora

from services.learner.heads import LossCall
from services.learner.one_step import shape_of_lora
from services.learner.operation_rows import datums
from services.learner.optimizer import AdamParams
from services.learner.slots import Slot
from shared.rl.seeds import derive_seed
from shared.store.memory import MemoryStore
from tests.unit.learner.batches import go_on
from tests.unit.learner.operation_world import (
    ADAM,
    LORA,
    Catalog,
    Learner,
    Model,
    train,
)

ADAPTER, OPTIMIZER, GRADIENTS = "adapter.safetensors", "optimizer.safetensors", "gradients.safetensors"


async def steps(catalog: Catalog, model: Model, numbers: range | list[int], passes: int = 2) -> list[str]:
    """For each number so many forward_backwards and an optimizer step; the requests' names."""
    made = []
    for number in numbers:
        made += [await catalog.submit(model, "forward_backward", train(10 * number + part)) for part in range(passes)]
        made.append(await catalog.submit(model, "optim_step", ADAM))
    return made


def primitives(bench: Any, numbers: range, passes: int = 2, lora: Lora = LORA) -> Slot:
    """The same steps by the training primitives alone, as the event path makes them."""
    slot: Slot = bench._slots.acquire("acme/alone", shape_of_lora(lora))
    slot.initialise(derive_seed(7, "adapter-init"))
    for number in numbers:
        for part in range(passes):
            data = datums(train(10 * number + part))
            bench._trainer.forward_backward(slot, data, LossCall("cross_entropy"), go_on)
        bench._trainer.optim_step(slot, AdamParams(**vars(ADAM)))
    return slot


async def files_of(store: MemoryStore, checkpoint: CheckpointRef | None) -> dict[str, bytes]:
    assert checkpoint is not None
    return {name: await store.get(ref) for name, ref in checkpoint.files.items()}


async def uninterrupted(
    learner: Callable[..., Learner], store: MemoryStore, numbers: range | list[int]
) -> dict[str, bytes]:
    """The last training checkpoint of a model that nothing happened to."""
    quiet = Catalog(store)
    model = quiet.model()
    await steps(quiet, model, numbers)
    await learner(quiet).drain()
    return await files_of(store, model.start)
