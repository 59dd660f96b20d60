"""Update commands of several policies at one workbench, whoever holds its base: one process or several."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from mint_schemas import FileRef
from mint_schemas.commands import UpdateRequested
from mint_schemas.training import ArithmeticTask, Grpo, KlPenalty, Lora, Optimizer, Sft, TaskDemonstrations
from safetensors.torch import load as load_tensors

from services.learner.config import LearnerSettings
from services.learner.step import UpdateJob
from services.learner.workbench import Workbench
from shared.bases import Base, load_base
from shared.catalog.api import UpdateResult
from shared.errors import Retryable
from shared.rl.record import Group, RolloutRecord, Trajectory
from shared.store.memory import MemoryStore
from tests.tiny import TINY_NAME, TINY_TOKEN
from tests.unit.learner.scenes import MAX_RANK

SETTINGS = LearnerSettings(
    learner_precision="float32",
    learner_slots=4,
    learner_batch_tokens=128,
    learner_schedule="batched",
    learner_threads=1,
)


def tiny_base(directory: Path) -> Base:
    return load_base(TINY_NAME, TINY_TOKEN, directory, MAX_RANK)


class CountingStore(MemoryStore):
    """Remembers every key that was put."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[str] = []

    async def put(self, key: str, data: bytes | Path) -> Any:
        self.puts.append(key)
        return await super().put(key, data)


class Attempt:
    def __init__(self, store: CountingStore, path: str) -> None:
        self._store, self._path = store, path

    async def put(self, name: str, data: bytes) -> Any:
        return await self._store.put(f"{self._path}/{name}", data)


class Lease:
    """Lost at check number `lost_at`; asked in no process but the first."""

    def __init__(self, lost_at: int = 0) -> None:
        self._lost_at, self._checks = lost_at, 0

    def check(self) -> None:
        self._checks += 1
        if self._checks == self._lost_at:
            raise Retryable("lease lost")


TASK = ArithmeticTask(kind="arithmetic")
OPTIMIZER = Optimizer(learning_rate=1e-3)
SFT = Sft(kind="sft", data=TaskDemonstrations(kind="task", task=TASK), steps=4, batch_size=6, optimizer=OPTIMIZER)
GRPO = Grpo(kind="grpo", task=TASK, steps=4, epochs=2, kl=KlPenalty(coefficient=0.1), optimizer=OPTIMIZER)
LORA_A = Lora(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj"))
LORA_B = Lora(rank=2, alpha=4.0, use_rslora=True, target_modules=("up_proj",))


class Runs:
    """Update commands of several policies at one workbench, as the catalog would give them."""

    def __init__(self, bench: Workbench) -> None:
        self.store = CountingStore()
        self._bench = bench
        self._job = UpdateJob({bench.base.name: bench}, self.store)
        self.results: dict[str, UpdateResult] = {}

    async def step(self, policy: str, step: int, lost_at: int = 0, **changes: Any) -> UpdateResult:
        before = self.results.get(f"{policy} {step - 1}")
        command = UpdateRequested(
            **{
                "command_id": f"{policy}:update:{step}", "run_id": f"run-{policy[-1]}", "policy": policy,
                "base": self._bench.base.name, "step": step, "steps": 4, "method": SFT, "lora": LORA_A, "seed": 7,
                "start": before and before.checkpoint, "fresh_optimizer": before is None, "export": False, **changes,
            }
        )  # fmt: skip
        attempt = Attempt(self.store, f"{policy}/{step}" + ("/lost" if lost_at else ""))
        result = await self._job(command, attempt, Lease(lost_at))
        self.results[f"{policy} {step}"] = result
        return result

    async def record(self, run_id: str, policy: str) -> FileRef:
        """Two groups of four, of random tokens."""
        generator = torch.Generator().manual_seed(5)
        groups = []
        for g in range(2):
            drawn = [torch.randint(3, 49152, (4 + i,), generator=generator).tolist() for i in range(4)]
            trajectories = tuple(
                Trajectory(
                    token_ids=tuple(ids),
                    logprobs=(-10.8,) * len(ids),
                    reward=float(i % 2),
                    finish_reason="stop",
                    text="",
                )
                for i, ids in enumerate(drawn)
            )
            groups.append(Group(prompt_id=f"p{g}", prompt_ids=(5, 6, 7, 8), answer="1", trajectories=trajectories))
        record = RolloutRecord(
            run_id=run_id, step=1, policy=policy, base=self._bench.base.name, base_sha256=self._bench.base.sha256,
            revision=None, adapter_sha256=None, temperature=1.0, max_tokens=8, task_sha256="", seed=7,
            groups=tuple(groups),
        )  # fmt: skip
        return await self.store.put(f"records/{run_id}", record.to_bytes())


async def jobs(bench: Workbench) -> dict[str, Any]:
    """SFT of two shapes side by side, a lost lease, GRPO with a reference and two epochs from a parent."""
    runs = Runs(bench)
    first = await runs.step("acme/a", 1)
    await asyncio.gather(runs.step("acme/a", 2), runs.step("acme/b", 1, lora=LORA_B))
    try:
        await runs.step("acme/b", 2, lost_at=1, lora=LORA_B)
        lost = ""
    except Retryable as error:
        lost = str(error)
    await asyncio.gather(runs.step("acme/b", 2, lora=LORA_B), runs.step("acme/a", 3, export=True))
    about = {
        "method": GRPO, "record": await runs.record("run-c", "acme/c"), "record_step": 1,
        "reference": first.checkpoint,
    }  # fmt: skip
    await runs.step("acme/c", 1, start=first.checkpoint, **about)
    await runs.step("acme/c", 2, epoch=1, **about)
    adapters = {
        name: load_tensors(await runs.store.get(result.checkpoint.files["adapter.safetensors"]))
        for name, result in runs.results.items()
    }
    metrics = {name: result.metrics for name, result in runs.results.items()}
    return {"lost": lost, "metrics": metrics, "adapters": adapters, "puts": runs.store.puts}
