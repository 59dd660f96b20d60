"""One sample request: hold the revision, ask the engine, pass the chunks on, let go.

In flows a `SampleRequest`; out flow what served it and its chunks. Invariants: the hold lasts until
the engine's iterator is closed; what is served is named by what the engine loaded, never by the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from services.serving.errors import EngineDown, InvalidRequest, Loading, Problem
from services.serving.loader import Loaded
from services.serving.residency import Residency
from services.serving.supervise import Supervisor
from shared.engine.port import EngineDead, EngineError, InferenceEngine, NotResident, SampleChunk, SampleRequest
from shared.sampling.port import Served
from shared.telemetry.metrics import IN_FLIGHT, TOKENS

logger = logging.getLogger(__name__)


@dataclass
class Sampling:
    """A started request: its first chunk is there. `close` aborts generation and lets go."""

    served: Served
    chunks: AsyncIterator[SampleChunk]
    closing: AsyncExitStack

    async def close(self) -> None:
        await self.closing.aclose()


class Sampler:
    def __init__(self, supervisor: Supervisor, residency: Residency, replica: str) -> None:
        self._supervisor, self._residency, self._replica = supervisor, residency, replica
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()

    async def open(self, request: SampleRequest) -> Sampling:
        """Returns when the first chunk is there. Raises the `Problem` that says why there is none."""
        self._supervisor.engine()
        async with AsyncExitStack() as stack:
            try:
                sampling = await self._start(request, stack)
            except _Evicted:
                sampling = await self._start(request, stack)
            sampling.closing = stack.pop_all()
            return sampling

    async def _start(self, request: SampleRequest, stack: AsyncExitStack) -> Sampling:
        loaded: Loaded | None = None
        if request.revision is not None:
            loaded = await stack.enter_async_context(self._residency.hold(request.revision))
        engine = loaded.engine if loaded is not None else self._supervisor.engine()
        served = self._served(engine, loaded)
        self._enter(stack, served.base)
        chunks = await stack.enter_async_context(aclosing(self._guarded(engine, request)))
        try:
            first = await anext(chunks)
        except NotResident as error:
            if loaded is None:
                raise Problem(f"the engine lacks its own base: {error}") from error
            logger.warning("the engine dropped %s by itself; loading it again", request.revision)
            self._residency.forget(loaded)
            raise _Evicted(f"{request.revision} left the engine; try again") from error
        except StopAsyncIteration:
            raise Problem(f"the engine answered request {request.request_id} with nothing") from None
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        counted = await stack.enter_async_context(aclosing(self._counted(first, chunks, served.base)))
        return Sampling(served, counted, stack)

    async def _guarded(self, engine: InferenceEngine, request: SampleRequest) -> AsyncGenerator[SampleChunk, None]:
        """The engine's chunks, its death turned into an answer and a restart."""
        try:
            async with aclosing(engine.sample(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
        except EngineDead as error:
            self._supervisor.dead(engine)
            raise EngineDown(f"the engine died under request {request.request_id} and is being restarted") from error
        except NotResident:
            raise
        except EngineError as error:
            raise Problem(f"the engine failed on request {request.request_id}: {error}") from error

    async def _counted(
        self, first: SampleChunk, rest: AsyncIterator[SampleChunk], base: str
    ) -> AsyncGenerator[SampleChunk, None]:
        tokens = TOKENS.labels(base, "sampled")
        tokens.inc(len(first.token_ids))
        yield first
        async for chunk in rest:
            tokens.inc(len(chunk.token_ids))
            yield chunk

    def _served(self, engine: InferenceEngine, loaded: Loaded | None) -> Served:
        has = engine.capabilities()
        return Served(
            base=has.base_name,
            base_sha256=has.base_sha256,
            revision=loaded.proof.revision if loaded else None,
            adapter_sha256=loaded.proof.adapter_sha256 if loaded else None,
            replica=self._replica,
            boot_id=self._supervisor.boot_id,
            engine=has.name,
        )

    def _enter(self, stack: AsyncExitStack, base: str) -> None:
        gauge = IN_FLIGHT.labels(base)
        self.in_flight += 1
        self.idle.clear()
        gauge.inc()

        def leave() -> None:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()
            gauge.dec()

        stack.callback(leave)


class _Evicted(Loading):
    """Held by us, dropped by the engine."""
