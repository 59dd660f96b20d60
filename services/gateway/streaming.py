"""Server-sent events, files made for one answer, and work that stops when the client has gone.

In: an async iterator of events, a file or a coroutine. Out: an answer. Invariant: whatever way an answer ends,
sent, failed or the client gone, what produced it is closed, so that no generation runs for nobody.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import FileResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from shared.errors import Refused

__all__ = ["ClientGone", "EventStream", "MadeFile", "event", "turn", "until_disconnect"]

T = TypeVar("T")


class ClientGone(Refused):
    def __init__(self) -> None:
        super().__init__("the client closed the connection", code="client_closed_request", status=499)


class EventStream(StreamingResponse):
    """Closes through `close` even when the stream was never begun: an iterator that nobody started runs
    no `finally` of its own."""

    def __init__(
        self,
        events: AsyncIterator[str],
        headers: Mapping[str, str] | None = None,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        kept = {"cache-control": "no-cache", "x-accel-buffering": "no"} | dict(headers or {})
        super().__init__(events, headers=kept, media_type="text/event-stream")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._close is not None:
                await self._close()


class MadeFile(FileResponse):
    """A file in a directory of its own, which is removed, also when the client leaves in the middle (a background
    task would not run)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.to_thread(shutil.rmtree, Path(self.path).parent, True)


def event(data: Any, name: str | None = None, number: int | None = None) -> str:
    """One server-sent event; `data` is text as it stands, or what becomes JSON."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    lines = [f"id: {number}"] if number is not None else []
    if name is not None:
        lines.append(f"event: {name}")
    return "\n".join([*lines, f"data: {text}", "", ""])


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes first. Raises ClientGone then."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


@asynccontextmanager
async def turn(places: asyncio.Semaphore, request: Request) -> AsyncIterator[None]:
    """One of `places`, for a client that is there still when it is free. Raises ClientGone. What has begun then goes
    on whether the client stays or not: a thread cannot be stopped, and has its place until it ends."""
    await until_disconnect(request, places.acquire())
    try:
        yield
    finally:
        places.release()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
