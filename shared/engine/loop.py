"""The engine around a `TokenModel`: queue, static batches, working set, proof of a load.

One worker thread owns the model: batches step there, and adapters come and go between two steps. The
event loop only moves chunks. Used by the Transformers engine and the fake.

Invariant: a failed batch fails its own requests and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from shared.adapters.admission import Admitted, Host, admit
from shared.adapters.manifest import Manifest
from shared.engine.batch import Batch, Job, TokenModel, prompt_logprobs
from shared.engine.port import (
    AdapterRefused,
    Capabilities,
    EngineDead,
    EngineError,
    LoadReport,
    ResidentAdapter,
    SampleChunk,
    SampleRequest,
)
from shared.engine.proof import check_report
from shared.engine.requests import check_request, sequence_seeds
from shared.engine.shelf import Shelf

R = TypeVar("R")


@dataclass(frozen=True)
class Applied:
    """What the model did with an adapter: modules applied, and whether its tensors read back equal."""

    modules: int
    tensors_equal: bool


class AdapterModel(TokenModel, Protocol):
    kv_bytes_per_token: int

    def add(self, handle: int, manifest: Manifest, directory: Path, admitted: Admitted) -> Applied: ...

    def remove(self, handle: int) -> None: ...


class LoopEngine:
    """`max_rows` sequences and `max_tokens` tokens (prompts padded, completions in full) in a batch."""

    def __init__(
        self, model: AdapterModel, host: Host, has: Capabilities, *, max_rows: int = 64, max_tokens: int = 65536
    ) -> None:
        self._model = model
        self._host = host
        self._has = has
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._shelf = Shelf(has.max_resident, self._remove)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._waiting: list[Job] = []
        self._driver: asyncio.Task[None] | None = None
        self._closed = False

    async def load(self, manifest: Manifest, directory: Path) -> LoadReport:
        async def install(handle: int) -> LoadReport:
            return await self._call(lambda: self._install(handle, manifest, directory))

        return await self._shelf.load(manifest, install)

    async def unload(self, revision: str) -> None:
        await self._shelf.unload(revision)

    async def pin(self, revision: str, pinned: bool) -> None:
        self._shelf.pin(revision, pinned)

    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        self._check_open()
        check_request(request, self._has, self._model.vocab_size)
        with ExitStack() as held:
            handle = held.enter_context(self._shelf.hold(request.revision)) if request.revision is not None else None
            job = Job(request, handle, sequence_seeds(request.seed, request.n))
            self._enqueue(job)
            try:
                running = request.n
                while running:
                    chunk = await job.chunks.get()
                    if isinstance(chunk, EngineError):
                        raise chunk
                    running -= chunk.finish_reason is not None
                    yield chunk
            finally:
                job.aborted = True

    async def resident(self) -> list[ResidentAdapter]:
        return self._shelf.resident(lambda handle: True)

    def capabilities(self) -> Capabilities:
        return self._has

    async def close(self) -> None:
        self._closed = True
        if self._driver is not None:
            self._driver.cancel()
            with suppress(asyncio.CancelledError):
                await self._driver
        self._fail(self._waiting, EngineDead("the engine was closed"))
        await asyncio.to_thread(self._thread.shutdown)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("the engine was closed; make a new one")

    async def _call(self, work: Callable[[], R]) -> R:
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _install(self, handle: int, manifest: Manifest, directory: Path) -> LoadReport:
        started = time.monotonic()
        admitted = admit(manifest, directory, self._host)
        try:
            applied = self._model.add(handle, manifest, directory, admitted)
            report = LoadReport(
                revision=manifest.revision,
                modules_applied=applied.modules,
                modules_expected=len(admitted.modules),
                adapter_sha256=admitted.adapter_sha256,
                tensors_equal=applied.tensors_equal,
                probe_logprobs=self._probe(handle, manifest),
                seconds=time.monotonic() - started,
            )
            check_report(report, manifest, self._has.dtype)
        except AdapterRefused:
            self._model.remove(handle)
            raise
        except Exception as error:
            # Admitted, so the fault may be the moment's (memory, files): no refusal, which would stand for good.
            self._model.remove(handle)
            raise EngineError(f"adapter {manifest.revision} could not be applied: {error!r}") from error
        return report

    def _probe(self, handle: int, manifest: Manifest) -> tuple[float, ...]:
        if manifest.probe is None:
            return ()
        prompt = manifest.probe.prompt
        logits = self._model.prefill([prompt], [handle], [True]).full[0]
        assert logits is not None
        return tuple(value for value in prompt_logprobs(logits, prompt, 0)[0] if value is not None)

    async def _remove(self, handle: int) -> None:
        await self._call(lambda: self._model.remove(handle))

    def _enqueue(self, job: Job) -> None:
        self._waiting.append(job)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())

    async def _drive(self) -> None:
        while jobs := self._next_jobs():
            try:
                await self._run(Batch(self._model, jobs))
            except asyncio.CancelledError:
                self._fail(jobs, EngineDead("the engine was closed"))
                raise
            except Exception as error:
                failure = EngineError(f"a batch of {len(jobs)} requests failed: {error!r}")
                failure.__cause__ = error
                self._fail(jobs, failure)

    async def _run(self, batch: Batch) -> None:
        while not batch.finished:
            for job, chunk in await self._call(batch.step):
                job.chunks.put_nowait(chunk)

    @staticmethod
    def _fail(jobs: list[Job], error: EngineError) -> None:
        for job in jobs:
            job.chunks.put_nowait(error)

    def _next_jobs(self) -> list[Job]:
        """The most urgent waiting job, and what fits beside it. Prompt logprobs hold whole prompts of
        logits, so such jobs go in small batches of their own."""
        self._waiting = sorted((j for j in self._waiting if not j.aborted), key=lambda j: j.request.priority)
        taken: list[Job] = []
        for job in self._waiting:
            if not taken or self._fits([*taken, job]):
                taken.append(job)
        self._waiting = [job for job in self._waiting if job not in taken]
        return taken

    def _fits(self, jobs: list[Job]) -> bool:
        if len({job.request.settings.prompt_logprobs is None for job in jobs}) > 1:
            return False
        longest = max(len(job.request.prompt) for job in jobs)
        if jobs[0].request.settings.prompt_logprobs is not None and longest * len(jobs) > 2048:
            return False
        rows = sum(job.request.n for job in jobs)
        tokens = longest + max(job.request.settings.max_tokens for job in jobs)
        return rows <= self._max_rows and rows * tokens <= self._max_tokens
