"""A sampling service on a real bus: a replica over HTTP that a fake sampler answers, a catalog that grants
and commits in memory, and resources to build the service from. And replicas that answer by a script, on real
sockets, so that every way of losing one can be played."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from mint_schemas import CONTRACTS

from shared.bases import Base
from shared.bus import Bus
from shared.catalog import api
from shared.engine.port import SampleChunk, SampleRequest
from shared.http import Health, HttpServer
from shared.residency import REPLICAS_BUCKET, ReadyRevision, Replica
from shared.sampling import wire
from shared.sampling.directory import ReplicaDirectory
from shared.sampling.fake import FakeSampler
from shared.sampling.port import Served
from shared.service import Resources
from shared.settings import CommonSettings
from shared.store.port import ObjectStore
from shared.telemetry.metrics import REGISTRY


class Commands:
    """The catalog's part in a command: granted once, committed once, then answered with its event."""

    def __init__(self, event_type: str, token: str) -> None:
        self._event_type, self._token = event_type, token
        self.takes = 0
        self.results: dict[str, api.Result] = {}
        self.released = 0

    async def take(self, request: api.TakeRequest) -> api.TakeAnswer:
        self.takes += 1
        if request.command_id in self.results:
            return api.TakeAnswer(status="committed", event=self._event(request.command_id))
        return api.TakeAnswer(status="granted", epoch=self.takes)

    async def renew(self, request: api.LeaseRequest) -> api.RenewAnswer:
        return api.RenewAnswer(held=True)

    async def release(self, request: api.LeaseRequest) -> None:
        self.released += 1

    async def commit(self, request: api.CommitRequest) -> api.CommitAnswer:
        self.results.setdefault(request.command_id, request.result)
        return api.CommitAnswer(event=self._event(request.command_id))

    def _event(self, command_id: str) -> api.OutgoingEvent:
        result = self.results[command_id].model_dump(mode="json")
        facts = {"run_id": "run-1", "policy": "acme/adder", "base": "tiny/llama", "command_id": command_id, "step": 1}
        body = next(c.body for c in CONTRACTS if c.type == self._event_type).model_validate(result | facts)
        return api.OutgoingEvent(type=self._event_type, id=command_id, token=self._token, body=body.model_dump())


@asynccontextmanager
async def replica(bus: Bus, base: Base, sampler: FakeSampler) -> AsyncIterator[str]:
    """Serves `sampler` under the wire protocol and announces it; gives its url."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(Health("serving"), listener)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    @server.app.post(wire.SAMPLE_PATH)
    async def sample(request: Request, base: str) -> StreamingResponse:
        asked = wire.decode_request(await request.body())

        async def lines() -> AsyncIterator[bytes]:
            async with sampler.stream(base, asked) as stream:
                yield wire.encode_served(stream.served)
                async for chunk in stream.chunks:
                    yield wire.encode_chunk(chunk)
            yield wire.encode_done()

        return StreamingResponse(lines(), media_type=wire.MEDIA_TYPE)

    async with server:
        await _announce(bus, base, sampler, url)
        yield url


async def _announce(bus: Bus, base: Base, sampler: FakeSampler, url: str) -> None:
    ready = tuple(ReadyRevision(revision=r, adapter_sha256=s) for r, s in (sampler.adapters or {}).items())
    value = announced("fake-0", base.name, url=url, token=base.token, boot_id="fake-boot", ready=ready)
    await bus.kv(REPLICAS_BUCKET).put(f"{base.token}.fake-0", value.model_dump_json().encode())


@dataclass(frozen=True)
class Answer:
    """`body` in pieces; `cut`: the connection is reset after them; `gate`: what must happen before the first."""

    pieces: tuple[bytes, ...] = ()
    status: int = 200
    retry_after_s: int | None = None
    cut: bool = False
    gate: asyncio.Event | None = None


Script = Callable[[SampleRequest], Answer]


@dataclass
class ScriptedReplica:
    """A replica on a socket of its own. Each request gets what `script` says; `asked` keeps them all. `reports`
    is what it says of its residency, None for a replica that never answers. `keeps` its connections open for the
    next request; `connections` counts them."""

    name: str
    script: Script = field(default_factory=lambda: whole)
    reports: Answer | None = None
    asked: list[SampleRequest] = field(default_factory=list)
    port: int = 0
    keeps: bool = False
    connections: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ScriptedReplica]:
        handling: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            handling.add(task)
            self.connections += 1
            try:
                await self._handle(reader, writer)
                while self.keeps:
                    await self._handle(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            finally:
                handling.discard(task)
                writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in [*handling]:
                task.cancel()
            await asyncio.gather(*handling, return_exceptions=True)

    def announcement(self, base: str = "tiny/llama", **changes: Any) -> Replica:
        return announced(self.name, base=base, url=f"http://127.0.0.1:{self.port}", **changes)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if wire.RESIDENCY_PATH in head:
            answer = self.reports
        else:
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            request = wire.decode_request(await reader.readexactly(length))
            self.asked.append(request)
            answer = self.script(request)
        if answer is None:
            await reader.read()
            return
        if answer.gate is not None:
            await answer.gate.wait()
        retry = "" if answer.retry_after_s is None else f"retry-after: {answer.retry_after_s}\r\n"
        close = "" if self.keeps else "connection: close\r\n"
        writer.write(f"HTTP/1.1 {answer.status} -\r\n{retry}{close}transfer-encoding: chunked\r\n\r\n".encode())
        for piece in answer.pieces:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
        if answer.cut:
            # Not `abort`, which may throw away what was written: the end is missing, and that is the cut.
            writer.close()
            return
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def announced(name: str, base: str = "tiny/llama", **changes: Any) -> Replica:
    """A replica with 4 slots as it would announce itself now."""
    value = Replica(
        replica=name,
        boot_id=f"{name}-boot",
        url="http://127.0.0.1:9",
        base=base,
        token="tiny-llama",
        engine="fake",
        dtype="float32",
        max_rank=32,
        slots=4,
        max_resident=16,
        at=time.time(),
    )
    return value.model_copy(update=changes)


def having(*revisions: str) -> tuple[ReadyRevision, ...]:
    """The `ready` of an announcement."""
    return tuple(ReadyRevision(revision=revision, adapter_sha256="a" * 64) for revision in revisions)


def served(request: SampleRequest, base: str = "tiny/llama", **changes: Any) -> bytes:
    """The first line of an answer."""
    facts = {"revision": request.revision, "adapter_sha256": "a" * 64, "replica": "-", "boot_id": "-", "engine": "fake"}
    return wire.encode_served(Served(**{"base": base, "base_sha256": "b" * 64, **facts, **changes}))


def chunk(token: int, finish: Any = None) -> bytes:
    return wire.encode_chunk(SampleChunk(0, (token,), None, finish_reason=finish))


def whole(request: SampleRequest) -> Answer:
    """Tokens 5 and 6, and the end."""
    return Answer((served(request), chunk(5), chunk(6, "stop"), wire.encode_done()))


def says(status: int, code: Any, retry_after_s: int | None = None, **more: Any) -> Script:
    """An answer that never becomes a stream."""
    body = json.dumps(wire.error_body(code, f"{code} it is", **more)).encode()
    return lambda _: Answer((body,), status, retry_after_s)


def resources(name: str, settings: CommonSettings, bus: Bus, store: ObjectStore, catalog: Any, base: Base) -> Resources:
    return Resources(name, settings, bus, store, catalog, {base.name: base}, REGISTRY, "http://127.0.0.1:0")


def ready_on(directory: ReplicaDirectory, base: str, revision: str) -> list[Replica]:
    """The replicas on which the revision is ready."""
    return [r for r in directory.replicas(base) if any(ready.revision == revision for ready in r.ready)]


async def until(holds: Any, what: str, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.02)
