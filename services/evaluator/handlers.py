"""`evaluation.requested` → score on held-out items → the details' file and the score.

The worker runner takes the command, commits the result and publishes what the commit answers.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from mint_schemas.commands import EvaluationRequested

from services.evaluator.scoring import Scorer
from shared.catalog.api import EvaluationResult
from shared.errors import Fatal
from shared.tasks import TaskLoader
from shared.worker import AttemptFiles, LeaseView

__all__ = ["DETAILS_FILE", "EvaluationHandler"]

DETAILS_FILE = "details.json.gz"


@dataclass(frozen=True)
class EvaluationHandler:
    """`scorers` by the base's public name."""

    scorers: dict[str, Scorer]
    tasks: TaskLoader

    async def __call__(self, command: EvaluationRequested, files: AttemptFiles, lease: LeaseView) -> EvaluationResult:
        """Raises Fatal and Retryable as `Scorer.details` does, and what `lease.check` raises."""
        began = time.monotonic()
        scorer = self.scorers.get(command.base)
        if scorer is None:
            raise Fatal(f"no base model {command.base!r} is configured here; there are {', '.join(self.scorers)}")
        task = await self.tasks.load(command.task)
        details = await scorer.details(command, task, lease.check)
        content = await asyncio.to_thread(details.to_bytes)
        lease.check()
        return EvaluationResult(
            revision=details.revision,
            adapter_sha256=details.adapter_sha256,
            task_sha256=details.task_sha256,
            scorer=details.scorer,
            sampling=details.sampling,
            items=len(details.items),
            score=details.score,
            details=await files.put(DETAILS_FILE, content),
            seconds=time.monotonic() - began,
        )
