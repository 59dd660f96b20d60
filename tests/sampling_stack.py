"""A sampling service on a real bus: a replica over HTTP that a fake sampler answers, a catalog that grants
and commits in memory, and resources to build the service from."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from mint_schemas import CONTRACTS

from shared.bases import Base
from shared.bus import Bus
from shared.catalog import api
from shared.http import Health, HttpServer
from shared.residency import REPLICAS_BUCKET, ReadyRevision, Replica
from shared.sampling import wire
from shared.sampling.fake import FakeSampler
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
    value = Replica(
        replica="fake-0",
        boot_id="fake-boot",
        url=url,
        base=base.name,
        token=base.token,
        engine="fake",
        dtype="float32",
        max_rank=32,
        slots=4,
        max_resident=4,
        ready=tuple(ReadyRevision(revision=r, adapter_sha256=s) for r, s in (sampler.adapters or {}).items()),
        at=time.time(),
    )
    await bus.kv(REPLICAS_BUCKET).put(f"{base.token}.fake-0", value.model_dump_json().encode())


def resources(name: str, settings: CommonSettings, bus: Bus, store: ObjectStore, catalog: Any, base: Base) -> Resources:
    return Resources(name, settings, bus, store, catalog, {base.name: base}, REGISTRY, "http://127.0.0.1:0")


async def until(holds: Any, what: str, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.02)
