"""The engine's life: started, watched, restarted when it dies.

Out flows the running engine, or `EngineDown` while there is none: requests are answered at once, never
left waiting for a dead engine. Each start has its own `boot_id`. Invariant: at most one engine lives at
a time; the dead one is closed before the next is created.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Protocol

from services.serving.errors import EngineDown
from shared.ending import end
from shared.engine.port import EngineDead, EngineError, InferenceEngine

logger = logging.getLogger(__name__)

CreateEngine = Callable[[], Awaitable[InferenceEngine]]
CLOSE_TIMEOUT_S = 30.0
MAX_BACKOFF_S = 30.0
HUNG_S = 120.0
"""Far above the longest step of a loaded engine."""


class WorkingSet(Protocol):
    """What must be told when an engine comes and goes."""

    def lost(self) -> None:
        """Nothing is resident any more."""

    async def restore(self) -> None:
        """A new engine is up: bring back what was resident and what is desired."""


class Supervisor:
    """`create` first ends what a killed predecessor left running, then starts an engine."""

    def __init__(self, create: CreateEngine, poll_s: float = 2.0, backoff_s: float = 1.0) -> None:
        self._create, self._poll_s, self._backoff_s = create, poll_s, backoff_s
        self._engine: InferenceEngine | None = None
        self._died = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.boot_id = ""
        self.restarts = 0
        self.reason = "the engine is starting"

    def start(self, working_set: WorkingSet) -> None:
        self._task = asyncio.create_task(self._run(working_set), name="engine-supervisor")

    async def stop(self) -> None:
        await end(self._task)
        engine, self._engine = self._engine, None
        self.reason = "this replica is shutting down"
        if engine is not None:
            await _close(engine)

    def engine(self) -> InferenceEngine:
        """Raises EngineDown while no engine runs."""
        if self._engine is None:
            raise EngineDown(f"{self.reason}; try again")
        return self._engine

    def running(self) -> InferenceEngine | None:
        return self._engine

    def dead(self, engine: InferenceEngine) -> None:
        """Report that `engine` raised EngineDead; from now on it gets no request."""
        if engine is self._engine:
            self._engine = None
            self.reason = "the engine died and is being restarted"
            self._died.set()

    async def _run(self, working_set: WorkingSet) -> None:
        while True:
            engine = await self._start()
            restoring = asyncio.create_task(working_set.restore(), name="restore-working-set")
            try:
                await self._until_dead(engine)
            finally:
                await end(restoring)
            logger.error("the engine died; restarting it")
            self.restarts += 1
            working_set.lost()
            await _close(engine)

    async def _start(self) -> InferenceEngine:
        delay = self._backoff_s
        while True:
            try:
                engine = await self._create()
            except Exception as error:
                self.reason = f"the engine does not start: {error}"
                logger.exception("the engine does not start; next try in %.0f s", delay)
                await asyncio.sleep(delay)
                delay = min(delay * 2, MAX_BACKOFF_S)
            else:
                self.boot_id = uuid.uuid4().hex
                self._died.clear()
                self._engine = engine
                return engine

    async def _until_dead(self, engine: InferenceEngine) -> None:
        """Looks at the engine every `poll_s`, since an idle one dies unseen. An engine that contradicts
        itself is believed to be broken only when it does so twice: a load may be half-way."""
        doubts = 0
        while not self._died.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._died.wait()
                return
            trouble = await _look(engine)
            doubts = doubts + 1 if trouble is not None else 0
            if isinstance(trouble, EngineDead) or doubts > 1:
                logger.error("the engine cannot be used any more: %s", trouble)
                self.dead(engine)


async def _look(engine: InferenceEngine) -> EngineError | None:
    try:
        async with asyncio.timeout(HUNG_S):
            await engine.resident()
    except EngineError as error:
        return error
    except TimeoutError:
        return EngineDead(f"it did not answer for {HUNG_S:.0f} s")
    except Exception as error:
        # Whatever an engine raises, the watch over it must not end.
        return EngineError(f"it cannot say what is resident: {error!r}")
    return None


async def _close(engine: InferenceEngine) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await engine.close()
    except Exception as error:
        logger.warning("closing the engine failed: %r", error)
