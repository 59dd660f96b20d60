"""The replica's HTTP: POST /internal/v1/sample, GET /internal/v1/residency and the same as GET /v1/residency.

Problems before the first chunk are answers with their own status; later ones are the stream's last line.
Invariant: a client that goes away, or stops reading, ends its generation and its hold, whatever it waited for.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from services.serving.errors import InvalidRequest, Problem, WrongBase
from services.serving.sampling import Sampler, Sampling
from services.serving.status import Status
from shared.engine.port import SampleRequest
from shared.sampling import wire
from shared.telemetry import span
from shared.telemetry.spans import GENERATE

logger = logging.getLogger(__name__)

PUBLIC_RESIDENCY_PATH = "/v1/residency"
WRITE_WAIT_S = 60.0
"""How long a reader may take nothing, with its turn and its hold kept for it."""


def make_router(sampler: Sampler, status: Status, base: str) -> APIRouter:
    router = APIRouter()

    @router.post(wire.SAMPLE_PATH)
    async def sample(request: Request) -> Response:
        body = await request.body()
        try:
            asked = _decode(request, body, base)
            attributes = {"mint.revision": asked.revision, "mint.request_id": asked.request_id, "mint.n": asked.n}
            with span(GENERATE, attributes=attributes):
                sampling = await _unless_gone(request, sampler.open(asked))
        except Problem as problem:
            return _answer(problem)
        if sampling is None:
            return Response(status_code=499)
        return _SampleResponse(sampling)

    @router.get(PUBLIC_RESIDENCY_PATH)
    @router.get(wire.RESIDENCY_PATH)
    async def residency() -> dict[str, Any]:
        return await status.report()

    return router


def _decode(request: Request, body: bytes, base: str) -> SampleRequest:
    wanted = request.query_params.get("base")
    if wanted is not None and wanted != base:
        raise WrongBase(f"this replica serves {base}, not {wanted}; ask a replica of {wanted}")
    try:
        return wire.decode_request(body)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def _answer(problem: Problem) -> Response:
    headers = {}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_s)))
    body = wire.error_body(problem.code, str(problem), problem.queue_position, problem.expected_wait_s)
    return JSONResponse(body, status_code=problem.status, headers=headers)


async def _unless_gone(request: Request, opening: Coroutine[Any, Any, Sampling]) -> Sampling | None:
    """The opened sampling, or None when the client left before its first chunk."""
    opened = asyncio.create_task(opening)
    gone = asyncio.create_task(_disconnected(request))
    taken = False
    try:
        await asyncio.wait({opened, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            return None
        sampling, taken = opened.result(), True
        return sampling
    finally:
        gone.cancel()
        opened.cancel()
        await asyncio.gather(opened, gone, return_exceptions=True)
        if not taken and not opened.cancelled() and opened.exception() is None:
            await opened.result().close()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _SampleResponse(StreamingResponse):
    """Closes the sampling however the response ends, at once and not when memory is collected; ends a response
    whose reader takes nothing for `write_wait_s`."""

    def __init__(self, sampling: Sampling, write_wait_s: float = WRITE_WAIT_S) -> None:
        self._sampling, self._lines, self._write_wait_s = sampling, _lines(sampling), write_wait_s
        super().__init__(self._lines, media_type=wire.MEDIA_TYPE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stalled = False

        async def sent(message: Message) -> None:
            nonlocal stalled
            try:
                async with asyncio.timeout(self._write_wait_s):
                    await send(message)
            except TimeoutError:
                stalled = True
                raise

        try:
            await super().__call__(scope, receive, sent)
        except Exception:
            if not stalled:
                raise
            logger.warning("a reader took nothing for %.0f s; its sample is ended", self._write_wait_s)
        finally:
            try:
                await self._lines.aclose()
            finally:
                await self._sampling.close()


async def _lines(sampling: Sampling) -> AsyncGenerator[bytes, None]:
    yield wire.encode_served(sampling.served)
    try:
        async for chunk in sampling.chunks:
            yield wire.encode_chunk(chunk)
    except Problem as problem:
        yield wire.encode_error(problem.code, str(problem))
    except Exception as error:
        logger.exception("sampling broke off")
        yield wire.encode_error("internal", f"sampling broke off: {error!r}")
    else:
        yield wire.encode_done()
