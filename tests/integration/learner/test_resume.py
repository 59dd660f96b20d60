"""Killed and resumed across processes: the same step in another process is the same bytes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch
from mint_schemas.training import KlPenalty, Optimizer

from shared.store.memory import MemoryStore
from tests.tiny import make_tiny_base
from tests.unit.learner.jobs import GRPO, Attempt, Lease, command, digests, grpo_run, make_job, place, put_groups

METHOD = GRPO.model_copy(
    update={
        "steps": 8, "epochs": 2, "minibatches": 2, "kl": KlPenalty(coefficient=0.2),
        "optimizer": Optimizer(learning_rate=1e-2, schedule="cosine"),
    }
)  # fmt: skip


class Killed(Lease):
    """The third check is the process's last instruction."""

    def check(self):
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _steps(directory, store, steps, start):
    torch.set_num_threads(1)
    results = asyncio.run(grpo_run(lambda: make_job(directory, store), store, METHOD, *steps, start=start))
    return [digests(result.checkpoint) for result in results]


def _dies_in(directory, store, step, start):
    async def die():
        record = await put_groups(store, seed=1, step=1)
        made = command(step, start, METHOD, record=record, **place(step, METHOD))
        await make_job(directory, store, max_tokens=1)(made, Attempt(store), Killed(checks=2))

    asyncio.run(die())


# the killed process takes multiprocessing's helper with it
@pytest.mark.filterwarnings("ignore:resource_tracker:UserWarning")
async def test_a_learner_that_is_killed_is_continued_by_another_process_to_the_byte(tmp_path: Path) -> None:
    """Steps 1 and 2 here; SIGKILL in the midst of step 3 of the record; steps 3 to 6 in another process:
    every file is what one process makes of all six, lp_old, reference and moments among them."""
    torch.set_num_threads(1)
    directory, store = make_tiny_base(tmp_path / "base"), MemoryStore()
    one = make_job(directory, store)
    whole = await grpo_run(lambda: one, store, METHOD, *range(1, 7))
    start = whole[1].checkpoint
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as dying, pytest.raises(BrokenProcessPool):
        await asyncio.wrap_future(dying.submit(_dies_in, directory, store, 3, start))
    with ProcessPoolExecutor(1, mp_context=spawn) as other:
        resumed = await asyncio.wrap_future(other.submit(_steps, directory, store, (3, 4, 5, 6), start))
    assert resumed == [digests(result.checkpoint) for result in whole[2:]]
