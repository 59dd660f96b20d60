"""Update commands and what a learner needs to do them: a base, attempts, leases, a store, records."""

from __future__ import annotations

import itertools
import json
import os
from functools import cache
from types import SimpleNamespace

import torch
from mint_schemas.commands import UpdateRequested
from mint_schemas.training import ArithmeticTask, Dpo, Grpo, JsonlPairs, Lora, Optimizer, Sft, TaskDemonstrations

from services.learner.base_model import ResidentBase
from services.learner.slots import SlotTable
from services.learner.step import UpdateJob
from services.learner.trainer import TorchTrainer
from services.learner.workbench import Schedule, Workbench
from shared.bases import DENSE_TARGETS
from shared.errors import Retryable
from shared.rl.record import Group, RolloutRecord, Trajectory
from shared.text.codec import TextCodec

BASE = SimpleNamespace(
    target_modules=DENSE_TARGETS, max_rank=32, name="tiny/llama", token="tiny-llama", sha256="b" * 64
)
LORA = Lora(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj"))
TASK = ArithmeticTask(kind="arithmetic")
SFT = Sft(kind="sft", data=TaskDemonstrations(kind="task", task=TASK), steps=9, batch_size=6)
GRPO = Grpo(kind="grpo", task=TASK, steps=9)
_NUMBERS = itertools.count()


def new_key(kind):
    """Of no other object, whichever process of a test puts it."""
    return f"{kind}/{os.getpid()}-{next(_NUMBERS)}"


class Attempt:
    """Files under a path of its own, in the memory store."""

    def __init__(self, store):
        self._store, self._path = store, new_key("attempts")

    async def put(self, name, data):
        return await self._store.put(f"{self._path}/{name}", data)


class Lease:
    """Good for so many checks."""

    def __init__(self, checks=10**9, error=None):
        self._left, self._error = checks, error or Retryable("lease lost")

    def check(self):
        self._left -= 1
        if self._left < 0:
            raise self._error


class Watched(TorchTrainer):
    """Notes the rows of every forward_backward as the loss saw them, who was in it, and what was loaded."""

    def __init__(self, base, max_tokens):
        super().__init__(base, max_tokens)
        self.seen, self.turns, self.loaded = [], [], []

    def forward_backward_batch(self, works):
        self.seen += [work.data for work in works]
        self.turns.append([work.slot.policy for work in works])
        return super().forward_backward_batch(works)

    def load(self, slot, *arguments, **settings):
        self.loaded.append(slot.policy)
        super().load(slot, *arguments, **settings)


_codec = cache(TextCodec.load)


def make_workbench(directory, base=BASE, max_tokens=4096, capacity=3, schedule=None):
    resident = ResidentBase(directory, "float32", DENSE_TARGETS)
    slots = SlotTable(resident, capacity, BASE.max_rank)
    return Workbench(
        base, resident, slots, Watched(resident, max_tokens), _codec(directory), schedule or Schedule("sliced")
    )


def make_job(directory, store, **changes):
    bench = make_workbench(directory, **changes)
    return UpdateJob({bench.base.name: bench}, store)


def bench_of(job):
    return next(iter(job._benches.values()))


def trainer_of(job):
    return bench_of(job)._trainer


def place(step, method):
    """Which part of which record update `step` uses, as the command says it."""
    per_record = method.steps_per_record
    within = (step - 1) % per_record
    return {
        "record_step": (step - 1) // per_record * per_record + 1,
        "epoch": within // method.minibatches,
        "minibatch": within % method.minibatches,
    }


def command(step, start=None, method=SFT, policy="acme/a", **changes):
    return UpdateRequested(
        **{
            "command_id": f"run:update:{step}", "run_id": "run", "policy": policy, "base": "tiny/llama", "step": step,
            "steps": 9, "method": method, "lora": LORA, "seed": 7, "start": start, "fresh_optimizer": False,
            "export": False, **changes,
        }
    )  # fmt: skip


async def run(job, store, *steps, start=None, **changes):
    """The result of the last of `steps`, each from the one before."""
    for step in steps:
        result = await job(command(step, start, **changes), Attempt(store), Lease())
        start = result.checkpoint
    return result


async def grpo_run(job_of, store, method, *steps, start=None, **changes):
    """The results of `steps`, each by the learner that `job_of` gives; a record for each `record_step`."""
    results = []
    for step in steps:
        where = place(step, method)
        record = await put_groups(store, seed=where["record_step"], step=where["record_step"])
        made = command(step, start, method, record=record, **where, **changes)
        changes.pop("fresh_optimizer", None)
        results.append(await job_of()(made, Attempt(store), Lease()))
        start = results[-1].checkpoint
    return results


def digests(checkpoint):
    return {name: ref.sha256 for name, ref in checkpoint.files.items()}


async def put_record(store, rewards, **changes):
    """One group of a prompt of two tokens, completions of two."""
    trajectories = tuple(
        Trajectory(token_ids=(10 + i, 2), logprobs=(-10.0, -10.0), reward=r, finish_reason="stop", text="")
        for i, r in enumerate(rewards)
    )
    group = Group(prompt_id="p", prompt_ids=(1, 2), answer="", trajectories=trajectories)
    return await _put(store, (group,), **changes)


async def put_groups(store, groups=4, size=3, seed=0, **changes):
    """Ragged random completions; in each group the rewards differ."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length):
        return tuple(torch.randint(3, 49152, (length,), generator=generator).tolist())

    def trajectory(number):
        tokens = ids(2 + int(torch.randint(0, 6, (), generator=generator)))
        noise = torch.randn(len(tokens), generator=generator, dtype=torch.float64) * 0.1
        logprobs = tuple((noise - 10.8).tolist())
        return Trajectory(
            token_ids=tokens, logprobs=logprobs, reward=float(number), finish_reason="stop", text=""
        )  # fmt: skip

    made = tuple(
        Group(
            prompt_id=f"p{number}", prompt_ids=ids(3 + number), answer="",
            trajectories=tuple(trajectory(i) for i in range(size)),
        )
        for number in range(groups)
    )  # fmt: skip
    return await _put(store, made, **changes)


async def _put(store, groups, **changes):
    record = RolloutRecord(
        **{
            "run_id": "run", "step": 1, "policy": "acme/a", "base": "tiny/llama", "base_sha256": "b" * 64,
            "revision": None, "adapter_sha256": None, "temperature": 1.0, "max_tokens": 8, "task_sha256": "0" * 64,
            "seed": 0, "groups": groups, **changes,
        }
    )  # fmt: skip
    return await store.put(new_key("records"), record.to_bytes())


async def dpo_method(store, steps=9):
    rows = [
        {"prompt": f"What is {i}+{i}?", "chosen": f"It is {2 * i}.", "rejected": "I do not know, sorry."}
        for i in range(6)
    ]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    pairs = JsonlPairs(kind="jsonl", data=await store.put(new_key("pairs"), data))
    return Dpo(kind="dpo", data=pairs, steps=steps, batch_size=3, optimizer=Optimizer(learning_rate=5e-3))
