"""`rollout.requested` → sample and score → the record's file and its figures.

The worker runner takes the command, commits the result and publishes what the commit answers.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from statistics import fmean

from mint_schemas.commands import RolloutRequested

from services.rollout.groups import GroupSampler
from shared.catalog.api import RolloutResult
from shared.errors import Fatal
from shared.tasks import TaskLoader
from shared.telemetry.metrics import REWARD_MEAN
from shared.worker import AttemptFiles, LeaseView

__all__ = ["RECORD_FILE", "RolloutHandler"]

RECORD_FILE = "record.json.gz"


@dataclass(frozen=True)
class RolloutHandler:
    """`samplers` by the base's public name."""

    samplers: dict[str, GroupSampler]
    tasks: TaskLoader

    async def __call__(self, command: RolloutRequested, files: AttemptFiles, lease: LeaseView) -> RolloutResult:
        """Raises Fatal and Retryable as `GroupSampler.record` does, and what `lease.check` raises."""
        began = time.monotonic()
        sampler = self.samplers.get(command.base)
        if sampler is None:
            raise Fatal(f"no base model {command.base!r} is configured here; there are {', '.join(self.samplers)}")
        task = await self.tasks.load(command.task)
        record = await sampler.record(command, task, lease.check)
        content = await asyncio.to_thread(record.to_bytes)
        lease.check()
        trajectories = [trajectory for group in record.groups for trajectory in group.trajectories]
        reward_mean = fmean(trajectory.reward for trajectory in trajectories)
        REWARD_MEAN.labels(sampler.base.token).set(reward_mean)
        return RolloutResult(
            record=await files.put(RECORD_FILE, content),
            revision=record.revision,
            adapter_sha256=record.adapter_sha256,
            groups=len(record.groups),
            trajectories=len(trajectories),
            tokens=sum(len(trajectory.token_ids) for trajectory in trajectories),
            reward_mean=reward_mean,
            seconds=time.monotonic() - began,
        )
