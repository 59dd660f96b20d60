"""Rollout → learner → exporter → engine, step after step in fp32: what is sampled is what was trained."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from mint_schemas.commands import CheckpointRef, ExportRequested, RolloutRequested, UpdateRequested
from mint_schemas.training import ArithmeticTask, Grpo, Lora, Optimizer

from services.exporter.export import ExportJob
from services.learner.app import make_bench
from services.learner.checkpoint import adapter_bytes
from services.learner.config import LearnerSettings
from services.learner.slots import Slot
from services.learner.step import UpdateJob
from services.rollout.groups import GroupSampler
from shared.adapters import layout
from shared.adapters.host import host_of
from shared.adapters.manifest import Manifest
from shared.bases import Base, load_bases
from shared.engine.create import create_engine
from shared.engine.port import InferenceEngine, SampleRequest
from shared.engine.settings import EngineSettings
from shared.rl.record import RolloutRecord
from shared.sampling.collect import collect
from shared.sampling.port import Sampled, SampleStream, Served
from shared.store.memory import MemoryStore
from shared.tasks import TaskSet, load_task
from shared.text import TextCodec
from shared.worker import AttemptFiles
from tests.sampling import no_files
from tests.tiny import TINY_NAME, make_tiny_base, write_bases_file

SUMS = ArithmeticTask(kind="arithmetic", max_operand=20)
LORA = Lora(rank=4, alpha=8.0, use_rslora=True)
TEMPERATURE = 0.6


class Lease:
    def check(self) -> None:
        return None


@dataclass
class EngineSampler:
    """The engine as rollouts see it; what it says of an adapter is what the engine lists."""

    engine: InferenceEngine
    base: Base

    async def sample(self, base: str, request: SampleRequest) -> Sampled:
        async with self.stream(base, request) as stream:
            return await collect(stream, request)

    @asynccontextmanager
    async def stream(self, base: str, request: SampleRequest) -> AsyncIterator[SampleStream]:
        listed = {adapter.revision: adapter.adapter_sha256 for adapter in await self.engine.resident()}
        sha256 = listed[request.revision] if request.revision else None
        served = Served(self.base.name, self.base.sha256, request.revision, sha256, "r0", "boot", "transformers")
        yield SampleStream(served, self.engine.sample(request))


class Loop:
    """One policy going round; `start`, `revision` and `sha256` are what the step before left."""

    def __init__(self, directory: Path, base: Base, engine: InferenceEngine, task: TaskSet, temperature: float) -> None:
        self._directory, self._base, self._engine, self._task = directory, base, engine, task
        self._store = MemoryStore()
        self.bench = make_bench(base, LearnerSettings(learner_precision="float32"))
        self._update = UpdateJob({TINY_NAME: self.bench}, self._store)
        self._export = ExportJob({TINY_NAME: host_of(base)}, self._store)
        self._rollout = GroupSampler(EngineSampler(engine, base), base, TextCodec.load(base.directory))
        optimizer = Optimizer(learning_rate=0.02)
        self._method = Grpo(kind="grpo", task=SUMS, steps=3, temperature=temperature, optimizer=optimizer)
        self.start: CheckpointRef | None = None
        self.revision: str | None = None
        self.sha256: str | None = None

    @property
    def slot(self) -> Slot:
        return self.bench._slots._slots["acme/a"]

    async def sample(self, step: int) -> RolloutRecord:
        command = RolloutRequested(
            **self._about("rollout", step), revision=self.revision, adapter_sha256=self.sha256, task=SUMS,
            prompts=6, group_size=4, max_tokens=8, temperature=self._method.temperature, seed=1,
        )  # fmt: skip
        return await self._rollout.record(command, self._task, lambda: None)

    async def train(self, step: int, record: RolloutRecord) -> dict[str, float]:
        command = UpdateRequested(
            **self._about("update", step), steps=3, method=self._method, lora=LORA, seed=3, start=self.start,
            fresh_optimizer=step == 1, export=True, record=await self._store.put(f"r/{step}", record.to_bytes()),
        )  # fmt: skip
        result = await self._update(command, AttemptFiles(self._store, "run", command.command_id), Lease())
        self.start = result.checkpoint
        return result.metrics

    async def export(self, step: int) -> tuple[Manifest, Path]:
        assert self.start is not None
        command = ExportRequested(
            **self._about("export", step), checkpoint=self.start, lora=LORA, parent=self.revision
        )  # fmt: skip
        result = await self._export(command, AttemptFiles(self._store, "run", command.command_id), Lease())
        where = self._directory / f"revision-{step}"
        where.mkdir()
        for name, ref in result.content.files.items():
            (where / name).write_bytes(await self._store.get(ref))
        return result.content.model_copy(update={"revision": f"acme/a@{step}"}), where

    def _about(self, kind: str, step: int) -> dict[str, Any]:
        return {
            "command_id": f"run:{kind}:{step}", "run_id": "run", "policy": "acme/a", "base": TINY_NAME, "step": step,
        }  # fmt: skip


def _letters(completion: str, answer: str) -> float:
    """A reward that a random model gets about half of the time."""
    return float(hashlib.sha256(completion.encode()).digest()[0] % 2)


@pytest.fixture
async def loop(tmp_path: Path) -> AsyncIterator[Loop]:
    base = load_bases(write_bases_file(tmp_path / "bases.json", make_tiny_base(tmp_path / "base")))[TINY_NAME]
    settings = EngineSettings(tmp_path / "state", dtype="float32", slots=2, max_resident=4, max_rank=16)
    engine = create_engine("transformers", base, settings)
    task = replace(await load_task(SUMS, no_files), reward=_letters)
    yield Loop(tmp_path, base, engine, task, TEMPERATURE)
    await engine.close()


async def test_each_step_is_sampled_by_the_adapter_that_the_step_before_exported(loop: Loop) -> None:
    """verl#7495, ART#661: at each step the engine's digest is the exporter's, and the record names it.
    trl#4159, prime-rl#697: at T = 0.6 the learner then computes the sampler's probabilities, ratio 1.
    unsloth-zoo#941: the export and the load leave the trainer's tensors as they were."""
    for step in (1, 2, 3):
        record = await loop.sample(step)
        assert (record.revision, record.adapter_sha256) == (loop.revision, loop.sha256)
        metrics = await loop.train(step, record)
        assert metrics["kept_groups"] > 0
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
        assert metrics["mismatch_max"] < 1e-3
        trained = adapter_bytes(loop.slot), {n: m.clone() for n, m in loop.slot.optimizer.first.items()}
        manifest, where = await loop.export(step)
        report = await loop._engine.load(manifest, where)
        assert report.adapter_sha256 == manifest.adapter_sha256
        assert report.adapter_sha256 == layout.adapter_sha256({f.name: layout.file_sha256(f) for f in where.iterdir()})
        assert report.probe_logprobs == pytest.approx(manifest.probe and manifest.probe.logprobs, abs=1e-4)
        assert adapter_bytes(loop.slot) == trained[0]
        assert all(moment.equal(trained[1][name]) for name, moment in loop.slot.optimizer.first.items())
        loop.revision, loop.sha256 = manifest.revision, manifest.adapter_sha256


async def test_a_record_of_the_step_before_is_seen_as_a_mismatch(loop: Loop) -> None:
    """verl#7495: what a stale adapter sampled is no ratio of 1, so that the watch has something to see."""
    record = await loop.sample(1)
    await loop.train(1, record)
    stale = await loop.train(2, record.model_copy(update={"step": 2}))
    assert stale["mismatch_max"] > 0.05
