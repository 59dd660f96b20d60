"""Five optimizer steps: what operations ask for, and the bytes that the training primitives alone make of it.

Losses, gradients of several passes, clipping, betas and weight decay change from step to step, so that state left over
from the step before would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from mint_schemas.training import Lora

from services.learner import checkpoint
from services.learner.base_model import ResidentBase
from services.learner.datum import Datum
from services.learner.heads import LossCall
from services.learner.optimizer import AdamParams
from services.learner.slots import Slot, SlotShape, SlotTable
from services.learner.trainer import TorchTrainer
from shared.adapters.peft_dir import serving_layout
from shared.bases import DENSE_TARGETS
from shared.operations.payload import AdamPayload, Row, TrainPayload
from shared.rl.seeds import derive_seed

SEED = 7
CLIP = 0.25


@dataclass(frozen=True)
class Step:
    passes: tuple[TrainPayload, ...]
    adam: AdamPayload


@dataclass(frozen=True)
class Made:
    """`adapter_model.safetensors` after the last step; of each step, the norm of its gradients before clipping."""

    adapter: bytes
    norms: list[float]


def five_steps() -> tuple[Step, ...]:
    """The second is clipped for sure, whatever base it is."""
    return (
        Step((_told(1),), AdamPayload(learning_rate=1e-2)),
        Step((_told(2), _told(3)), AdamPayload(learning_rate=1e-2, grad_clip_norm=CLIP)),
        Step((_sampled(4),), AdamPayload(learning_rate=1e-2, beta1=0.8, beta2=0.99, eps=1e-8)),
        Step((_sampled(5), _told(6)), AdamPayload(learning_rate=5e-3, weight_decay=0.1, grad_clip_norm=2.0)),
        Step((_sampled(7), _sampled(8)), AdamPayload(learning_rate=3e-3, beta1=0.0, beta2=0.9)),
    )


def by_primitives(directory: Path, steps: Sequence[Step], lora: Lora, batch_tokens: int) -> Made:
    """As the event path steps: forward_backward and optim_step on a slot of its own, in fp32 on one thread."""
    torch.set_num_threads(1)
    base = ResidentBase(directory, "float32", DENSE_TARGETS)
    trainer = TorchTrainer(base, batch_tokens)
    shape = SlotShape(lora.rank, lora.alpha, lora.use_rslora, tuple(sorted(lora.target_modules)))
    slot = SlotTable(base, 1, lora.rank).acquire("acme/alone", shape)
    slot.initialise(derive_seed(SEED, "adapter-init"))
    norms = [_step(trainer, slot, step) for step in steps]
    return Made(serving_layout(checkpoint.adapter_bytes(slot)), norms)


def _step(trainer: TorchTrainer, slot: Slot, step: Step) -> float:
    for asked in step.passes:
        data = [_datum(number, row) for number, row in enumerate(asked.rows)]
        trainer.forward_backward(slot, data, LossCall(asked.loss), lambda: None)
    return trainer.optim_step(slot, AdamParams(**vars(step.adam)))


def _datum(number: int, row: Row) -> Datum:
    inputs = {name: tuple(values.tolist()) for name, values in row.inputs.items()}
    targets = inputs.pop("target_tokens")
    return Datum(str(number), tuple(row.tokens.tolist()), targets, (True,) * len(targets), inputs)


def _told(seed: int) -> TrainPayload:
    """Some tokens weigh nothing, some less than that."""
    generator = np.random.default_rng(seed)
    rows = [
        _row(generator, length, weights=generator.choice([0.0, 1.0, 0.5, -0.25], length)) for length in (9, 31, 5, 17)
    ]
    return TrainPayload(tuple(rows), "cross_entropy")


def _sampled(seed: int) -> TrainPayload:
    """Near enough to what a random base says that no ratio is out of all bounds."""
    generator = np.random.default_rng(seed)
    rows = [
        _row(
            generator,
            length,
            logprobs=generator.normal(-12.0, 0.5, length),
            advantages=np.full(length, generator.normal()),
        )
        for length in (12, 7, 22)
    ]
    return TrainPayload(tuple(rows), "importance_sampling")


def _row(generator: np.random.Generator, length: int, **inputs: np.ndarray) -> Row:
    ids = generator.integers(3, 49152, length + 1, dtype=np.int64)
    floats = {name: values.astype(np.float32) for name, values in inputs.items()}
    return Row(ids[:-1].copy(), {"target_tokens": ids[1:].copy(), **floats})
