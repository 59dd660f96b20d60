"""AsyncLLM behind the engine port.

vLLM's own bookkeeping of adapters is never relied on: our shelf stays at or below its CPU cache, so
that it evicts nothing; ids are never reused; an adapter is added before it is named by a request, and
removed only when nothing runs on it. Each sequence is one vLLM request with its own seed.

Invariant: a revision is resident only when its slot was read back equal to its file.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from vllm import TokensPrompt
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from shared.adapters.admission import Host, admit
from shared.adapters.manifest import Manifest
from shared.bases import Base
from shared.engine.children import ChildRecord, end_processes
from shared.engine.port import (
    AdapterRefused,
    Capabilities,
    EngineDead,
    EngineError,
    LoadReport,
    ResidentAdapter,
    SampleChunk,
    SampleRequest,
    SamplingSettings,
)
from shared.engine.proof import check_report
from shared.engine.requests import check_request, sequence_seeds
from shared.engine.settings import EngineSettings
from shared.engine.shelf import Shelf

from .grammar import Follower, Grammars
from .listing import Listed
from .merge import merged
from .start import Started, start_vllm
from .translate import chunk_of, sampling_params

R = TypeVar("R")
_DEATH_POLL_S = 0.5


class VllmEngine:
    def __init__(self, started: Started, host: Host, has: Capabilities, vocab_size: int) -> None:
        self._llm = started.llm
        self._children: ChildRecord = started.children
        self._record: Path = started.record
        self._zero: LoRARequest | None = started.zero
        self._host = host
        self._has = has
        self._vocab_size = vocab_size
        self._requests: dict[int, LoRARequest] = {}
        self._names = itertools.count()
        self._shelf = Shelf(has.max_resident, self._remove)
        self._prepared = asyncio.Lock()
        self._group = started.group
        self._grammars: Grammars | None = started.grammars
        self._strays: set[int] = set()
        self._running = 0
        self._touched = 0
        self._listed: Listed | None = None
        self._ready = False
        self._closed = False

    async def load(self, manifest: Manifest, directory: Path) -> LoadReport:
        self._check_alive()
        await self._prepare()

        async def install(handle: int) -> LoadReport:
            return await self._install(handle, manifest, directory)

        return await self._shelf.load(manifest, install)

    async def unload(self, revision: str) -> None:
        await self._shelf.unload(revision)

    async def pin(self, revision: str, pinned: bool) -> None:
        self._shelf.pin(revision, pinned)

    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        self._check_alive()
        check_request(request, self._has, self._vocab_size)
        with ExitStack() as held:
            lora = self._zero
            if request.revision is not None:
                lora = self._requests[held.enter_context(self._shelf.hold(request.revision))]
            await self._prepare()
            followers = await self._followers(request)
            seeds = sequence_seeds(request.seed, request.n)
            sequences = [self._sequence(request, i, seeds[i], lora, followers[i]) for i in range(request.n)]
            held.enter_context(self._runs())
            async with aclosing(sequences[0] if request.n == 1 else merged(sequences)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def resident(self) -> list[ResidentAdapter]:
        """Raises EngineError if vLLM lists other adapters than the shelf: then neither can be trusted."""
        self._check_alive()
        now, touched = time.monotonic(), self._touched
        if self._listed is None or self._running or not self._listed.holds(touched, now):
            # The shelf first: a load that ends while vLLM answers must not look like a lost adapter.
            known = {entry.handle for entry in self._shelf.entries().values()}
            listed = await self._call(self._llm.list_loras())
            slots = frozenset(await self._rpc("mint_slots"))
            if not known <= set(listed):
                raise EngineError(f"vLLM lost adapters {sorted(known - set(listed))}; restart the engine")
            # Two calls were its own; whatever else came between makes it old at once.
            self._listed = Listed(touched + 2, now, slots)
        return self._shelf.resident(self._listed.slots.__contains__)

    def capabilities(self) -> Capabilities:
        return self._has

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._grammars is not None:
            self._grammars.close()
        # Nobody else tells them: `shutdown` cancels the task that feeds them, and its own error handling with it.
        self._llm.output_processor.propagate_error(EngineDeadError())
        try:
            await asyncio.to_thread(self._llm.shutdown)
        finally:
            # Again for those that began meanwhile; from now on vLLM refuses them itself.
            self._llm.output_processor.propagate_error(EngineDeadError())
        # vLLM closes its sockets and leaves their context, with its threads, to the garbage collector.
        await asyncio.to_thread(self._llm.engine_core.resources.ctx.destroy, 0)
        await asyncio.to_thread(end_processes, self._children.alive())
        self._record.unlink(missing_ok=True)

    async def _install(self, handle: int, manifest: Manifest, directory: Path) -> LoadReport:
        started = time.monotonic()
        admitted = await asyncio.to_thread(admit, manifest, directory, self._host)
        # The prefix cache keys on the name: it names the content, so that stale blocks cannot match.
        name = f"{manifest.revision}#{manifest.adapter_sha256}"
        path = await asyncio.to_thread(lambda: str(directory.absolute()))
        lora = LoRARequest(lora_name=name, lora_int_id=handle, lora_path=path)
        await self._clear_strays()
        try:
            await self._add(lora)
            back = await self._rpc("mint_read_back", handle, lora.lora_path, manifest.scaling)
            report = LoadReport(
                revision=manifest.revision,
                modules_applied=back["applied"],
                modules_expected=back["expected"],
                adapter_sha256=admitted.adapter_sha256,
                tensors_equal=back["equal"],
                probe_logprobs=await self._probe(manifest, lora),
                seconds=time.monotonic() - started,
            )
            check_report(report, manifest, self._has.dtype)
        except BaseException:
            self._strays.add(handle)
            with suppress(EngineError):
                await self._clear_strays()
            raise
        self._requests[handle] = lora
        return report

    async def _add(self, lora: LoRARequest) -> None:
        """Raises EngineError, never AdapterRefused: it was admitted, and why vLLM failed comes as text alone, a
        moment's want of memory like anything else."""
        try:
            added = await self._call(self._llm.add_lora(lora))
        except EngineDead:
            raise
        except EngineError as error:
            raise EngineError(f"adapter {lora.lora_name}: vLLM did not take it: {error}") from error
        if not added:
            raise EngineError(f"vLLM did not add adapter {lora.lora_name} as id {lora.lora_int_id}")

    async def _probe(self, manifest: Manifest, lora: LoRARequest) -> tuple[float, ...]:
        if manifest.probe is None:
            return ()
        settings = SamplingSettings(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        request = SampleRequest("probe", manifest.probe.prompt, settings)
        try:
            check_request(request, self._has, self._vocab_size)
        except ValueError as error:
            raise AdapterRefused(f"adapter {manifest.revision}: its probe cannot be asked: {error}") from error
        found: tuple[float | None, ...] = ()
        async for chunk in self._sequence(request, 0, 0, lora):
            found = chunk.prompt_logprobs or found
        return tuple(value for value in found if value is not None)

    async def _remove(self, handle: int) -> None:
        del self._requests[handle]
        self._strays.add(handle)
        await self._clear_strays()

    async def _clear_strays(self) -> None:
        """What a failed removal left in vLLM's cache goes before anything is added: were the cache full, vLLM would
        evict by its own choice."""
        for handle in sorted(self._strays):
            await self._call(self._llm.remove_lora(handle))
            self._strays.discard(handle)

    async def _followers(self, request: SampleRequest) -> Sequence[Follower | None]:
        grammar = request.settings.grammar
        if grammar is None or self._grammars is None:
            return [None] * request.n
        return await self._grammars.followers(grammar, request.n)

    async def _prepare(self) -> None:
        """Before the first request: what keeps base requests out of other adapters' slots."""
        async with self._prepared:
            if self._ready:
                return
            if self._group:
                await self._rpc("mint_group_lora")
            if self._zero is not None:
                await self._add(self._zero)
                await self._call(self._llm.pin_lora(self._zero.lora_int_id))
            self._ready = True

    async def _sequence(
        self, request: SampleRequest, index: int, seed: int, lora: LoRARequest | None, follower: Follower | None = None
    ) -> AsyncGenerator[SampleChunk, None]:
        end = self._grammars.end if self._grammars is not None else None
        generator = self._llm.generate(
            TokensPrompt(prompt_token_ids=list(request.prompt)),
            sampling_params(request.settings, seed, with_prompt=index == 0, grammar_end=end),
            f"{request.request_id}-{index}-{next(self._names)}",
            lora_request=lora,
            priority=request.priority,
        )
        async with aclosing(generator):
            try:
                async for output in generator:
                    if output.outputs[0].finish_reason == "error":
                        raise EngineError(f"vLLM gave request {request.request_id} up; its log says why")
                    chunk = chunk_of(index, output, request.prompt, request.settings)
                    if follower is not None:
                        follower.take(chunk.token_ids, chunk.finish_reason)
                    yield chunk
            except VLLMClientError as error:
                raise ValueError(f"vLLM refused the request: {error}") from error
            except EngineDeadError as error:
                raise EngineDead("vLLM's engine process is gone; restart the engine") from error
            except EngineGenerateError as error:
                raise EngineError(f"vLLM failed request {request.request_id}: {error.__cause__!r}") from error

    @contextmanager
    def _runs(self) -> Iterator[None]:
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._touched += 1

    async def _rpc(self, method: str, *args: Any) -> Any:
        return (await self._call(self._llm.collective_rpc(method, args=args)))[0]

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineDead("the engine was closed; make a new one")
        if self._llm.errored:
            raise EngineDead("vLLM's engine process is gone; restart the engine")

    async def _call(self, work: Awaitable[R]) -> R:
        """An answer of the engine process. Raises EngineDead when it dies instead of answering, and
        EngineError for what the call itself raised there (vLLM sends it as a bare Exception)."""
        self._touched += 1
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_DEATH_POLL_S)
                if not task.done():
                    self._check_alive()
            return task.result()
        except EngineDeadError as error:
            raise EngineDead("vLLM's engine process is gone; restart the engine") from error
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"a call of vLLM's engine process failed: {error}") from error
        finally:
            task.cancel()


def vllm_engine(base: Base, settings: EngineSettings) -> VllmEngine:
    """Start vLLM on a base (blocking, up to a minute). Raises Fatal if it does not start."""
    started, host, has, vocab_size = start_vllm(base, settings)
    return VllmEngine(started, host, has, vocab_size)
