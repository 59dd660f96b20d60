"""The shell of every service: boot, health, metrics, HTTP, and an end that gives everything back.

In: settings and a `build` that wires the service. Out: a process that says at /healthz what it waits
for, serves /metrics, ends on SIGTERM with exit code 0, and ends with 1 and a reason in the log when it
can never work (a bus that is not the table, a taken port). Invariant: when SIGTERM arrives, messages in
hand are given back before anything else is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import APIRouter
from prometheus_client import CollectorRegistry

from shared.bases import Base, load_bases
from shared.bus import Bus, table_for
from shared.catalog.client import CatalogClient
from shared.errors import Fatal, Retryable
from shared.http import Health, HttpServer
from shared.secrecy import keep_from_others
from shared.settings import CommonSettings
from shared.store.port import ObjectStore
from shared.store.s3 import S3Store
from shared.telemetry import flush, log, setup_logging, setup_tracing
from shared.telemetry.metrics import REGISTRY

__all__ = ["Resources", "ServiceApp", "run_service", "serve"]

_log = logging.getLogger(__name__)

_STOP_S = 20.0


@dataclass(frozen=True)
class Resources:
    """What the shell hands to a service. `url` is where its own HTTP answers; `bases` by public name."""

    name: str
    settings: CommonSettings
    bus: Bus
    store: ObjectStore
    catalog: CatalogClient
    bases: dict[str, Base]
    metrics: CollectorRegistry
    url: str


class ServiceApp(Protocol):
    """One service, wired. `start` returns when it is ready to work; `stop` ends it and may be called
    after a failed start; `healthy` is None, or why it cannot work now."""

    @property
    def routers(self) -> Sequence[APIRouter]: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def healthy(self) -> str | None: ...


_SHARE_MEMORY = ("learner", "serving")
"""Their processes hand each other memory of an accelerator, which the kernel allows between readable ones only."""

Build = Callable[[Resources], AbstractAsyncContextManager[ServiceApp]]


def run_service(name: str, settings: CommonSettings, build: Build) -> None:
    """Run until SIGTERM or SIGINT, then end the process: with 0, or 1 after a failure (see the log)."""
    if name not in _SHARE_MEMORY:
        keep_from_others()
    setup_logging(name, settings.log_level)
    setup_tracing(name)
    code = asyncio.run(_guarded(name, settings, build))
    flush()
    logging.shutdown()
    sys.stderr.flush()
    # A thread in the middle of a long computation cannot be ended, and nothing waits for its result.
    os._exit(code)


async def _guarded(name: str, settings: CommonSettings, build: Build) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # The loop would wait for the threads of its default pool before it closes.
    loop.shutdown_default_executor = _no_wait  # type: ignore[method-assign]
    try:
        await serve(name, settings, build, stop)
    except Exception as error:
        _log.critical("the service cannot go on: %s", error, exc_info=not isinstance(error, Fatal))
        return 1
    return 0


async def _no_wait(timeout: float | None = None) -> None:
    return None


async def serve(name: str, settings: CommonSettings, build: Build, stop: asyncio.Event) -> None:
    """The service until `stop` is set. Raises what made it fail."""
    listener = _listen(settings)
    url = f"http://{settings.host}:{listener.getsockname()[1]}"
    health = Health(name)
    async with AsyncExitStack() as stack:
        http = HttpServer(health, listener)
        await stack.enter_async_context(http)
        log(_log, logging.INFO, "started", url=url, pid=os.getpid(), worker=settings.worker_id)
        bus_and_app = asyncio.create_task(_up(name, settings, build, url, health, http, stack))
        if not await _first(stop, bus_and_app):
            return
        log(_log, logging.INFO, "ready")
        lost = asyncio.create_task(bus_and_app.result().lost())
        await _first(stop, http.ended, lost)
        health.waiting_for = "shutdown"
        log(_log, logging.INFO, "stopping")


async def _first(stop: asyncio.Event, *work: asyncio.Task[Any]) -> bool:
    """Wait for one of `work` or `stop`: True when work ended by itself (raising what it raised)."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({stopped, *work}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    for task in work:
        if task.done():
            task.result()
            return True
    for task in work:
        task.cancel()
    await asyncio.wait(work, timeout=_STOP_S)
    return False


async def _up(
    name: str, settings: CommonSettings, build: Build, url: str, health: Health, http: HttpServer, stack: AsyncExitStack
) -> Bus:
    health.waiting_for = f"the base models of {settings.bases_file}"
    bases = await asyncio.to_thread(load_bases, settings.bases_file)
    table = table_for([base.token for base in bases.values()], settings.ack_wait_s)
    bus = Bus(settings.nats_url, table, name=f"mint-{name}")
    store = S3Store(settings.s3_url, settings.s3_access_key, settings.s3_secret_key, settings.s3_bucket)
    stack.callback(store.close)
    catalog = CatalogClient(settings.catalog_url)
    stack.push_async_callback(catalog.close)
    stack.push_async_callback(bus.close)
    await _until(health, f"the bus at {settings.nats_url}", bus.connect)
    await _until(health, "the bus to equal its table", bus.check)
    await _until(health, f"the object store at {settings.s3_url}", store.ensure_bucket)
    health.waiting_for = "the service itself"
    resources = Resources(name, settings, bus, store, catalog, bases, REGISTRY, url)
    app = await stack.enter_async_context(build(resources))
    for router in app.routers:
        http.app.include_router(router)
    stack.push_async_callback(_stop, app)
    stack.push_async_callback(bus.drain)
    await app.start()
    health.ready(bus.ping, app.healthy)
    return bus


async def _stop(app: ServiceApp) -> None:
    with suppress(asyncio.TimeoutError):
        async with asyncio.timeout(_STOP_S):
            await app.stop()


async def _until(health: Health, what: str, attempt: Callable[[], Awaitable[None]]) -> None:
    """Try for as long as it is Retryable; /healthz says what is waited for and why."""
    while True:
        health.waiting_for = health.waiting_for if (health.waiting_for or "").startswith(what) else what
        try:
            await attempt()
        except Retryable as error:
            health.waiting_for = f"{what} ({error})"
            await asyncio.sleep(0.5)
        else:
            return


def _listen(settings: CommonSettings) -> socket.socket:
    """Raises Fatal naming the port that is taken."""
    # asyncio sends small writes at once (TCP_NODELAY) on sockets that say they are TCP, and on no others: a
    # protocol of 0 costs an answer of two writes the 40 ms of the other side's delayed acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise Fatal(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; set MINT_PORT") from error
    return listener
