"""The learner's job: one `update.requested` becomes one optimizer step and its training checkpoint.

Reads the start checkpoint, the rollout record or the chats; hands the arithmetic to a thread; writes
the files of the attempt. Invariant: what is computed depends on the command and the files it names
alone (in a joint turn, to rounding), so that a redelivered command gives the same checkpoint and never a
second step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from mint_schemas.commands import CheckpointRef, UpdateRequested
from mint_schemas.common import FileRef
from mint_schemas.training import Dpo, Grpo, Sft

from services.learner import checkpoint
from services.learner.chats import ChatLoader
from services.learner.dpo import dpo_rows, step_pairs
from services.learner.grpo import grpo_rows
from services.learner.one_step import SlotLost, StepOutcome, StepRequest
from services.learner.recipe import StepRows
from services.learner.sft import sft_rows, step_chats
from services.learner.workbench import Workbench
from shared.catalog.api import UpdateResult
from shared.errors import Fatal
from shared.rl.checkpoint import (
    ADAPTER_FILE,
    OLD_LOGPROBS_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    TrainingState,
    read_state,
)
from shared.rl.record import RolloutRecord
from shared.store.port import ObjectStore
from shared.telemetry import span, spans
from shared.telemetry.metrics import STEP_SECONDS, TOKENS, record_step_metrics


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
        with span(spans.TRAIN_STEP, attributes={"mint.policy": command.policy, "mint.step": command.step}):
            outcome = await self._turn(command, bench, rows, lease)
        refs = {name: await files.put(name, data) for name, data in outcome.files.items()}
        reference = CheckpointRef(files=refs, step=command.step)
        bench.keep(outcome, checkpoint.identity(reference))
        seconds = time.monotonic() - started
        STEP_SECONDS.labels(command.method.kind).observe(seconds)
        TOKENS.labels(bench.base.token, "train").inc(outcome.metrics.get("tokens", 0.0))
        record_step_metrics(bench.base.token, command.method.kind, outcome.metrics, outcome.skipped)
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

    async def _turn(self, command: UpdateRequested, bench: Workbench, rows: StepRows, lease: Lease) -> StepOutcome:
        """Files that the slots hold are not read, unless they are evicted before the turn comes."""
        await self._check_start(command)
        request = StepRequest(
            command=command,
            start=None if bench.holds(command) else await self._start(command),
            reference=None if bench.holds_reference(command) else await self._reference(command),
            old_logprobs=await self._old_logprobs(command),
            rows=rows,
            check=lease.check,
        )
        try:
            return await bench.step(request)
        except SlotLost:
            start, reference = await self._start(command), await self._reference(command)
            return await bench.step(replace(request, start=start, reference=reference), first=True)

    async def _old_logprobs(self, command: UpdateRequested) -> bytes | None:
        first = (command.epoch, command.minibatch) == (0, 0)
        if first or command.start is None or OLD_LOGPROBS_FILE not in command.start.files:
            return None
        return await self._store.get(command.start.files[OLD_LOGPROBS_FILE])

    async def _check_start(self, command: UpdateRequested) -> None:
        """Whether or not a slot holds the start: what is refused depends on the command alone."""
        start = command.start
        if start is None:
            if command.step > 1:
                raise Fatal(f"step {command.step} of run {command.run_id} names no training checkpoint to go on from")
        elif STATE_FILE in start.files:
            _check_state(command, start, read_state(await self._store.get(start.files[STATE_FILE])))

    async def _start(self, command: UpdateRequested) -> dict[str, bytes] | None:
        if command.start is None:
            return None
        needed = {ADAPTER_FILE, STATE_FILE} | (set() if command.fresh_optimizer else {OPTIMIZER_FILE})
        missing = needed - command.start.files.keys()
        if missing:
            raise Fatal(f"the training checkpoint of step {command.start.step} has no {', '.join(sorted(missing))}")
        return {name: await self._store.get(command.start.files[name]) for name in sorted(needed)}

    async def _reference(self, command: UpdateRequested) -> dict[str, bytes] | None:
        if command.reference is None:
            return None
        needed = {ADAPTER_FILE, STATE_FILE}
        missing = needed - command.reference.files.keys()
        if missing:
            raise Fatal(f"the run's reference has no {', '.join(sorted(missing))}")
        return {name: await self._store.get(command.reference.files[name]) for name in sorted(needed)}

    async def _rows(self, command: UpdateRequested, bench: Workbench) -> StepRows:
        seed, step = command.seed, command.step
        match command.method:
            case Sft() as method:
                known = await self._chats.load(method.data, method.train_on)
                chats = step_chats(known, seed, step, method.batch_size)
                return await asyncio.to_thread(sft_rows, chats, bench.codec, method.max_length, method.train_on)
            case Dpo() as method:
                pairs = step_pairs(await self._chats.load_pairs(method.data), seed, step, method.batch_size)
                return await asyncio.to_thread(dpo_rows, pairs, bench.codec, method.max_length, method.beta)
            case Grpo() as method:
                record = await self._record(command, bench)
                return await asyncio.to_thread(grpo_rows, record, method, command.epoch, command.minibatch, seed)

    async def _record(self, command: UpdateRequested, bench: Workbench) -> RolloutRecord:
        if command.record is None:
            raise Fatal(f"step {command.step} of method grpo names no rollout record")
        try:
            record = await asyncio.to_thread(RolloutRecord.from_bytes, await self._store.get(command.record))
        except (ValueError, OSError, EOFError) as error:
            raise Fatal(f"the rollout record {command.record.key} cannot be read: {error}") from error
        for what, found, wanted in (
            ("run", record.run_id, command.run_id),
            ("step", record.step, command.record_step or command.step),
            ("policy", record.policy, command.policy),
            ("base digest", record.base_sha256, bench.base.sha256),
        ):
            if found != wanted:
                raise Fatal(f"the rollout record is of {what} {found}, the command of {wanted}")
        return record


def _check_state(command: UpdateRequested, start: CheckpointRef, state: TrainingState) -> None:
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
