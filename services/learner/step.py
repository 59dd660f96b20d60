"""The learner's job: one `update.requested` becomes one optimizer step and its training checkpoint.

Reads the start checkpoint, the rollout record or the chats; hands the arithmetic to a thread; writes
the files of the attempt. Invariant: what is computed depends on the command and the files it names
alone, so that a redelivered command gives the same checkpoint and never a second step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

from mint_schemas.commands import CheckpointRef, UpdateRequested
from mint_schemas.common import FileRef
from mint_schemas.training import Grpo, Sft

from services.learner import checkpoint
from services.learner.chats import ChatLoader
from services.learner.grpo import grpo_rows
from services.learner.recipe import StepRows
from services.learner.sft import sft_rows, step_chats
from services.learner.workbench import Workbench
from shared.catalog.api import UpdateResult
from shared.errors import Fatal
from shared.rl.checkpoint import ADAPTER_FILE, OPTIMIZER_FILE, STATE_FILE, TrainingState, read_state
from shared.rl.record import RolloutRecord
from shared.store.port import ObjectStore
from shared.telemetry import span, spans
from shared.telemetry.metrics import STEP_SECONDS, TOKENS


class Files(Protocol):
    """The attempt's files (`shared/worker`)."""

    async def put(self, name: str, data: bytes) -> FileRef: ...


class Lease(Protocol):
    def check(self) -> None:
        """Raises when the lease was lost or the run ended."""
        ...


class UpdateJob:
    """Callable as a worker's job. `benches` by public base name."""

    def __init__(self, benches: Mapping[str, Workbench], store: ObjectStore) -> None:
        self._benches, self._store = benches, store
        self._chats = ChatLoader(store.get)

    async def __call__(self, command: UpdateRequested, files: Files, lease: Lease) -> UpdateResult:
        started = time.monotonic()
        bench = self._bench(command.base)
        rows = await self._rows(command, bench)
        async with bench.turns.turn():
            start = None if bench.holds(command) else await self._start(command)
            with span(spans.TRAIN_STEP, attributes={"mint.policy": command.policy, "mint.step": command.step}):
                outcome = await bench.turns.run(lambda check: bench.step(command, start, rows, check), lease.check)
            refs = {name: await files.put(name, data) for name, data in outcome.files.items()}
            reference = CheckpointRef(files=refs, step=command.step)
            bench.keep(command, checkpoint.identity(reference))
        seconds = time.monotonic() - started
        STEP_SECONDS.labels(command.method.kind).observe(seconds)
        TOKENS.labels(bench.base.token, "train").inc(outcome.metrics.get("tokens", 0.0))
        return UpdateResult(
            checkpoint=reference,
            adapter_changed=outcome.adapter_changed,
            skipped=outcome.skipped,
            metrics=outcome.metrics,
            seconds=seconds,
        )

    def _bench(self, base: str) -> Workbench:
        bench = self._benches.get(base)
        if bench is None:
            raise Fatal(f"this learner has no base {base!r}; it holds {', '.join(sorted(self._benches))}")
        return bench

    async def _start(self, command: UpdateRequested) -> dict[str, bytes] | None:
        if command.start is None:
            return None
        needed = {ADAPTER_FILE, STATE_FILE} | (set() if command.fresh_optimizer else {OPTIMIZER_FILE})
        missing = needed - command.start.files.keys()
        if missing:
            raise Fatal(f"the training checkpoint of step {command.start.step} has no {', '.join(sorted(missing))}")
        files = {name: await self._store.get(command.start.files[name]) for name in sorted(needed)}
        _check_start(command, command.start, read_state(files[STATE_FILE]))
        return files

    async def _rows(self, command: UpdateRequested, bench: Workbench) -> StepRows:
        match command.method:
            case Sft() as method:
                picked = step_chats(await self._chats.load(method.data), command.seed, command.step, method.batch_size)
                return await asyncio.to_thread(sft_rows, picked, bench.codec, method.max_length)
            case Grpo() as method:
                return await asyncio.to_thread(grpo_rows, await self._record(command, bench), method)

    async def _record(self, command: UpdateRequested, bench: Workbench) -> RolloutRecord:
        if command.record is None:
            raise Fatal(f"step {command.step} of method grpo names no rollout record")
        if (command.epoch, command.minibatch) != (0, 0):
            # lp_old is the learner's own logprob of now, so a second pass over a record would have ratio 1 again
            raise Fatal(
                f"step {command.step} asks for epoch {command.epoch}, minibatch {command.minibatch} of its record; "
                "this learner makes one step of a whole record (0, 0)"
            )
        try:
            record = await asyncio.to_thread(RolloutRecord.from_bytes, await self._store.get(command.record))
        except (ValueError, OSError, EOFError) as error:
            raise Fatal(f"the rollout record {command.record.key} cannot be read: {error}") from error
        for what, found, wanted in (
            ("run", record.run_id, command.run_id),
            ("step", record.step, command.step),
            ("policy", record.policy, command.policy),
            ("base digest", record.base_sha256, bench.base.sha256),
        ):
            if found != wanted:
                raise Fatal(f"the rollout record is of {what} {found}, the command of {wanted}")
        return record


def _check_start(command: UpdateRequested, start: CheckpointRef, state: TrainingState) -> None:
    """A run goes on from its own step before; only its first step may start elsewhere."""
    if state.step != start.step:
        raise Fatal(f"the training checkpoint of step {start.step} says that it is of step {state.step}")
    if command.fresh_optimizer:
        return
    if (state.run_id, state.policy, state.step) != (command.run_id, command.policy, command.step - 1):
        raise Fatal(
            f"step {command.step} of run {command.run_id} of {command.policy} cannot go on from step {state.step} "
            f"of run {state.run_id} of {state.policy}"
        )
