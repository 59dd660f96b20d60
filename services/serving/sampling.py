"""One sample request: let in, hold the revision, take a turn, ask the engine, pass the chunks on, let go.

In flows a `SampleRequest`; out flow what served it and its chunks. The order is limits, hold, turn, engine. The
hold comes before the turn, since a request that waits for a cold load would keep a place in the engine empty; one
that waits for its turn keeps its revision loaded, so that a turn is always used. Invariants: the hold lasts until
the engine's iterator is closed, the turn until the last sequence ends, and however a request ends, all is given
back; what is served is named by what the engine loaded, never by the request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace

from services.serving.errors import EngineDown, InvalidRequest, Loading, Problem, QueueFull, RateLimited
from services.serving.limits import RequestLimits
from services.serving.loader import Loaded
from services.serving.order import class_of
from services.serving.residency import Residency
from services.serving.supervise import Supervisor
from services.serving.turns import Turn, Turns
from shared.engine.port import EngineDead, EngineError, InferenceEngine, NotResident, SampleChunk, SampleRequest
from shared.sampling.port import BACKGROUND, INTERACTIVE, PREWARM, Served
from shared.telemetry.metrics import IN_FLIGHT, SAMPLE_WAIT_SECONDS, SAMPLES_REFUSED, SAMPLES_WAITING, TOKENS

logger = logging.getLogger(__name__)

CLASS_NAMES = {INTERACTIVE: "interactive", PREWARM: "prewarm", BACKGROUND: "background"}


@dataclass
class Sampling:
    """A started request: its first chunk is there. `close` aborts generation and lets go."""

    served: Served
    chunks: AsyncIterator[SampleChunk]
    closing: AsyncExitStack

    async def close(self) -> None:
        await self.closing.aclose()


class Sampler:
    """`in_flight` are the requests that this replica has, `waiting` those of them without a turn yet. The
    replica's own bound on a wait is for the hold and the turn; a request's own includes the engine's time to the
    first token."""

    def __init__(
        self, supervisor: Supervisor, residency: Residency, replica: str, turns: Turns, limits: RequestLimits
    ) -> None:
        self._supervisor, self._residency, self._replica = supervisor, residency, replica
        self._turns, self._limits = turns, limits
        self.in_flight = 0
        self.waiting = 0
        self.idle = asyncio.Event()
        self.idle.set()

    async def open(self, request: SampleRequest) -> Sampling:
        """Returns when the first chunk is there. Raises the `Problem` that says why there is none."""
        base = self._supervisor.engine().capabilities().base_name
        ends = time.monotonic() + (self._turns.bounds.wait_s if request.wait_s is None else request.wait_s)
        async with AsyncExitStack() as stack:
            with _refusals_counted(base):
                stack.enter_context(self._limits.admit(request.tenant, request.revision))
                stack.enter_context(self._present(base))
                try:
                    sampling = await self._start(request, base, ends)
                except _Evicted:
                    sampling = await self._start(request, base, ends)
            stack.push_async_callback(sampling.closing.aclose)
            return Sampling(sampling.served, sampling.chunks, stack.pop_all())

    async def _start(self, request: SampleRequest, base: str, ends: float) -> Sampling:
        async with AsyncExitStack() as stack:
            loaded, turn = await self._admitted(request, base, ends, stack)
            engine = loaded.engine if loaded is not None else self._supervisor.engine()
            served = self._served(engine, loaded)
            asked = replace(request, priority=turn.rank)
            chunks = await stack.enter_async_context(aclosing(self._guarded(engine, asked)))
            try:
                async with asyncio.timeout(None if request.wait_s is None else _left(ends)):
                    first = await anext(chunks)
            except NotResident as error:
                if loaded is None:
                    raise Problem(f"the engine lacks its own base: {error}") from error
                logger.warning("the engine dropped %s by itself; loading it again", request.revision)
                self._residency.forget(loaded)
                raise _Evicted(f"{request.revision} left the engine; try again") from error
            except StopAsyncIteration:
                raise Problem(f"the engine answered request {request.request_id} with nothing") from None
            except TimeoutError:
                raise QueueFull(f"the engine gave no first token within {request.wait_s} s; try again") from None
            except ValueError as error:
                raise InvalidRequest(str(error)) from error
            counted = await stack.enter_async_context(aclosing(self._counted(first, chunks, base, turn, request.n)))
            return Sampling(served, counted, stack.pop_all())

    async def _admitted(
        self, request: SampleRequest, base: str, ends: float, stack: AsyncExitStack
    ) -> tuple[Loaded | None, Turn]:
        """The hold on the revision (none for the base), then the turn; `stack` gives both back."""
        loaded: Loaded | None = None
        self.waiting += 1
        try:
            if request.revision is not None:
                hold = self._residency.hold(
                    request.revision,
                    priority=request.priority,
                    tenant=request.tenant,
                    wait_s=None if request.wait_s is None else _left(ends),
                )
                loaded = await stack.enter_async_context(hold)
            turn = await self._turn(request, base, ends)
        finally:
            self.waiting -= 1
        stack.callback(self._turns.release, turn)
        return loaded, turn

    async def _turn(self, request: SampleRequest, base: str, ends: float) -> Turn:
        name = CLASS_NAMES[class_of(request.priority)]
        slots = self._supervisor.engine().capabilities().slots
        began = time.monotonic()
        with SAMPLES_WAITING.labels(base, name).track_inprogress():
            turn = await self._turns.take(request, slots, _left(ends))
        SAMPLE_WAIT_SECONDS.labels(base, name).observe(time.monotonic() - began)
        return turn

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
        self, first: SampleChunk, rest: AsyncIterator[SampleChunk], base: str, turn: Turn, sequences: int
    ) -> AsyncGenerator[SampleChunk, None]:
        """Every chunk; with the end of the last sequence the next request enters, before that end is sent."""
        tokens = TOKENS.labels(base, "sampled")

        def count(chunk: SampleChunk) -> SampleChunk:
            nonlocal sequences
            tokens.inc(len(chunk.token_ids))
            sequences -= chunk.finish_reason is not None
            if not sequences:
                self._turns.release(turn)
            return chunk

        yield count(first)
        async for chunk in rest:
            yield count(chunk)

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

    @contextmanager
    def _present(self, base: str) -> Iterator[None]:
        self.in_flight += 1
        self.idle.clear()
        try:
            with IN_FLIGHT.labels(base).track_inprogress():
                yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()


class _Evicted(Loading):
    """Held by us, dropped by the engine."""


def _left(ends: float) -> float:
    return max(ends - time.monotonic(), 0.0)


@contextmanager
def _refusals_counted(base: str) -> Iterator[None]:
    try:
        yield
    except RateLimited as problem:
        SAMPLES_REFUSED.labels(base, problem.reason).inc()
        raise
    except QueueFull:
        SAMPLES_REFUSED.labels(base, "queue").inc()
        raise
