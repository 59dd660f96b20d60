"""SmolLM2-135M learns sums through the primitives alone: demonstrations first, then its own samples."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from mint_schemas.training import ArithmeticTask, Grpo

from services.learner.base_model import ResidentBase
from services.learner.convert_smollm2 import convert
from services.learner.grpo import grpo_rows
from services.learner.grpo_report import mismatch
from services.learner.optimizer import AdamParams
from services.learner.sft import sft_rows, step_chats
from services.learner.slots import SlotShape, SlotTable
from services.learner.trainer import TorchTrainer
from shared.bases import DENSE_TARGETS
from shared.tasks import demonstrations, load_task
from shared.text.codec import TextCodec
from tests.unit.learner.learning import Player

TASK = ArithmeticTask(kind="arithmetic")
GRPO = Grpo(kind="grpo", task=TASK, steps=12, max_tokens=4)
HELD_OUT = 256


def _go_on() -> None:
    return None


async def _no_file(ref: object) -> bytes:
    raise AssertionError(f"the arithmetic task reads no file, yet {ref} was asked for")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_eight_sft_steps_pass_a_third_of_held_out_sums_and_grpo_starts_in_step() -> None:
    """The base scores about 0; 8 steps of 32 rows at 1e-3, rank 8 → above 0.3, with the loss falling.
    GRPO's first record then has ratio near 1: sampler and learner compute one distribution."""
    directory = convert(Path(os.environ.get("MINT_CACHE", "~/.cache/mint")).expanduser() / "bases" / "smollm2-135m")
    base = ResidentBase(directory, "bfloat16", DENSE_TARGETS)
    untouched = base.digest()
    slots = SlotTable(base, 1, max_rank=8)
    trainer, codec, task = (
        TorchTrainer(base, 1024),
        TextCodec.load(directory),
        asyncio.run(load_task(TASK, _no_file)),
    )
    slot = slots.acquire("acme/adder", SlotShape(8, 32.0, False, tuple(sorted(DENSE_TARGETS))))
    slot.initialise(0)
    losses = []
    for step in range(1, 9):
        rows = sft_rows(step_chats(demonstrations(task), 0, step, 32), codec, 1024)
        losses.append(trainer.forward_backward(slot, rows.data, rows.call, _go_on).loss)
        trainer.optim_step(slot, AdamParams(1e-3, eps=1e-8, grad_clip_norm=1.0))
    player = Player(base, slots, codec, task)
    assert sum(losses[-2:]) < 0.5 * sum(losses[:2])
    assert player.score(slot, HELD_OUT) > 0.3

    slot.optimizer.reset()
    rows = grpo_rows(player.record(slot, 1, 12, 8, 4, seed=1), GRPO)
    result = trainer.forward_backward(slot, rows.data, rows.call, _go_on)
    found = mismatch(rows.data, result.logprobs)
    assert found["ratio_mean"] == pytest.approx(1.0, abs=0.1)
    assert found["mismatch_mean"] < 0.1
    assert trainer.optim_step(slot, AdamParams(5e-4, eps=1e-8, grad_clip_norm=1.0)) > 0
    assert base.digest() == untouched
