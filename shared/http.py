"""The HTTP side of a service: /healthz, /metrics, the service's own routes, one span per request."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.telemetry import SpanKind, span, spans
from shared.telemetry.metrics import HTTP_SECONDS, REGISTRY

__all__ = ["IDLE_S", "Health", "HttpServer"]

IDLE_S = 75
"""How long an idle connection is kept: for longer than any caller does, so that none is closed under a request."""
_QUIET = {"/healthz", "/metrics"}


class Health:
    """`waiting_for` None means that the service was ready once; then `ping` and `healthy` decide."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.waiting_for: str | None = "the process to start"
        self._ping: Callable[[float], Awaitable[bool]] | None = None
        self._healthy: Callable[[], str | None] | None = None

    def ready(self, ping: Callable[[float], Awaitable[bool]], healthy: Callable[[], str | None]) -> None:
        self._ping, self._healthy, self.waiting_for = ping, healthy, None

    async def reason(self) -> str | None:
        """None when the service works, else what it waits for."""
        if self.waiting_for is not None:
            return self.waiting_for
        if self._ping is not None and not await self._ping(0.5):
            return "the bus: the connection is lost"
        return self._healthy() if self._healthy is not None else None


class HttpServer:
    """Serves `app` on a socket that is bound already. `ended` ends when the server does."""

    ended: asyncio.Task[None]

    def __init__(self, health: Health, listener: socket.socket) -> None:
        self._listener = listener
        self.app = FastAPI(title=f"MinT {health.service}", docs_url=None, redoc_url=None)
        self.app.add_middleware(Traced)
        _add_standard_routes(self.app, health)
        self._server = _Server(
            uvicorn.Config(
                self.app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=5,
                timeout_keep_alive=IDLE_S,
            )
        )

    async def __aenter__(self) -> HttpServer:
        self.ended = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await asyncio.wait({self.ended}, timeout=10)
        self._listener.close()


class _Server(uvicorn.Server):
    """Signals belong to the service, not to its HTTP server."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _add_standard_routes(app: FastAPI, health: Health) -> None:
    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> JSONResponse:
        reason = await health.reason()
        if reason is None:
            return JSONResponse({"status": "ok", "service": health.service})
        body = {"status": "waiting", "service": health.service, "waiting_for": reason}
        return JSONResponse(body, status_code=503, headers={"Retry-After": "1"})

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)


class Traced:
    """A span and a duration per request, under the caller's traceparent; labels use the route."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _QUIET:
            await self._app(scope, receive, send)
            return
        status = [500]

        async def remember(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        traceparent = dict(scope["headers"]).get(b"traceparent", b"").decode("latin-1") or None
        started = time.monotonic()
        try:
            with span(f"{spans.HTTP} {scope['method']}", traceparent, SpanKind.SERVER):
                await self._app(scope, receive, remember)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            seconds = time.monotonic() - started
            HTTP_SECONDS.labels(scope["method"], route, str(status[0])).observe(seconds)
