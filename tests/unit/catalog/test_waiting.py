"""Waiting for samples and operations: woken by commits, of this process and of others, by the thousand."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn

from shared import open_files
from shared.catalog import operations as ops
from shared.operations.payload import digest, encode
from tests.catalog_kit import TINY, Lab, eventually
from tests.operations_kit import content, sample, train
from tests.unit.catalog.test_operation_routes import TENANT, Api

WAITERS = 2000
FEW_FILES = 1024
"""Open files of a process, as most systems start one."""


@pytest.fixture
async def api(lab: Lab) -> AsyncIterator[Api]:
    api = Api(lab)
    yield api
    await api.client.close()
    await api.catalog.close()


async def _sampled(api: Api) -> tuple[str, str]:
    """A sampler, and a sample of it that waits for a worker."""
    session = await api.client.new_session(ops.NewSession(tenant=TENANT))
    new = ops.NewSampler(tenant=TENANT, session_id=session.session_id, sampling_session_seq_id=0, base=TINY)
    sampler = (await api.client.new_sampler(new)).sampler_id
    data = encode(sample())
    asked = ops.SubmitSample(
        tenant=TENANT, sampling_session_id=sampler, seq_id=0, digest=digest(data), payload=content(data)
    )
    return sampler, (await api.client.submit_sample(asked)).request_id


async def test_whoever_waits_for_samples_hears_of_one_at_once(api: Api) -> None:
    sampler, request_id = await _sampled(api)
    waiting = asyncio.create_task(api.client.ended_samples(sampler, ops.AwaitSamples(tenant=TENANT, wait_s=30)))
    await eventually(lambda: sampler in api.waiters._samplers)
    other = ops.AwaitSamples(tenant=TENANT, first=1, wait_s=0.01)
    assert await api.client.ended_samples(sampler, other) == ops.SamplesEnded(cursor=0)
    await api.client.cancel(request_id, ops.Caller(tenant=TENANT))
    async with asyncio.timeout(10):
        found = await waiting
    assert [item.request_id for item in found.items] == [request_id]
    assert await api.client.ended_samples(sampler, other) == ops.SamplesEnded(cursor=1)
    assert api.waiters._samplers == {}
    assert (await api.client.join_sampler(sampler, ops.Caller(tenant=TENANT))).client == 1


async def test_samples_that_another_process_ends_are_seen_too(lab: Lab, api: Api) -> None:
    sampler, request_id = await _sampled(api)
    lab.database.committed = None
    net = asyncio.create_task(api.waiters.run())
    waiting = asyncio.create_task(api.client.ended_samples(sampler, ops.AwaitSamples(tenant=TENANT, wait_s=30)))
    await eventually(lambda: api.waiters._ended == {sampler: 0})
    await api.client.cancel(request_id, ops.Caller(tenant=TENANT))
    async with asyncio.timeout(10):
        assert [item.request_id for item in (await waiting).items] == [request_id]
    await eventually(lambda: api.waiters._ended == {})
    net.cancel()
    with pytest.raises(asyncio.CancelledError):
        await net


@asynccontextmanager
async def _served(api: Api) -> AsyncIterator[int]:
    """The port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(api.app, log_config=None, access_log=False, lifespan="off"))
        serving = asyncio.create_task(server._serve([listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving


async def _poll(port: int, request_id: str, turns: asyncio.Semaphore) -> ops.OperationView:
    async with turns:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        path = f"/internal/v1/operations/{request_id}?tenant={TENANT}&wait_s=60"
        writer.write(f"GET {path} HTTP/1.1\r\nhost: catalog\r\nconnection: close\r\n\r\n".encode())
        await writer.drain()
    answer = await reader.read()
    writer.close()
    return ops.OperationView.model_validate(json.loads(answer.partition(b"\r\n\r\n")[2]))


async def test_thousands_wait_while_others_are_answered(api: Api) -> None:
    # Both ends of every connection are in this process.
    if open_files.allow_more() < 2 * WAITERS + FEW_FILES:
        pytest.skip("this system allows a process too few open files")
    model_id = await api.opened()
    ids = [(await api.submit(model_id, number, "forward", encode(train(number)))).request_id for number in range(1, 11)]
    turns = asyncio.Semaphore(64)
    async with _served(api) as port:
        polls = [asyncio.create_task(_poll(port, ids[turn % len(ids)], turns)) for turn in range(WAITERS)]
        await eventually(lambda: sum(map(len, api.waiters._events.values())) == WAITERS, timeout_s=60)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            (await http.get(f"/internal/v1/models/{model_id}")).raise_for_status()
        await api.work(model_id)
        assert {view.state for view in await asyncio.gather(*polls)} == {"done"}
    assert api.waiters._events == {}
