"""Downloads that are cut: begun again from the start, and never counted complete (aibrix#2029).

A proxy before the real SeaweedFS cuts response bodies after a number of bytes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from shared.store.port import StoreUnavailable
from shared.store.s3 import S3Store
from tests.servers import S3Server

CONTENT = bytes(range(256)) * 8192
CUT_AFTER = 300_000


class CuttingProxy:
    """Passes requests on; the first `cuts` answers to GET end after CUT_AFTER bytes."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.cuts = 0
        self.gets = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        limit = asyncio.get_running_loop().create_future()
        up = asyncio.create_task(self._up(reader, upstream_writer, limit))
        with suppress(ConnectionError, asyncio.CancelledError):
            sent = 0
            while piece := await upstream_reader.read(16_384):
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
                if limit.done() and sent > CUT_AFTER:
                    break
        up.cancel()
        writer.close()
        upstream_writer.close()
        self._tasks.discard(task)

    async def _up(
        self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter, limit: asyncio.Future[None]
    ) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(16_384):
                if piece.startswith(b"GET "):
                    self.gets += 1
                    if self.cuts and not limit.done():
                        self.cuts -= 1
                        limit.set_result(None)
                upstream.write(piece)
                await upstream.drain()


@pytest.fixture
async def proxied(s3_server: S3Server, store: S3Store) -> AsyncIterator[tuple[CuttingProxy, S3Store]]:
    proxy = CuttingProxy(int(s3_server.url.rsplit(":", 1)[1]))
    port = await proxy.start()
    through = S3Store(f"http://127.0.0.1:{port}", s3_server.access_key, s3_server.secret_key, store._bucket)
    yield proxy, through
    through.close()
    await proxy.stop()


async def test_a_cut_download_is_retried_whole(
    proxied: tuple[CuttingProxy, S3Store], store: S3Store, tmp_path: Path
) -> None:
    proxy, through = proxied
    ref = await store.put("blobs/sha256/x", CONTENT)
    proxy.cuts = 1
    await through.fetch(ref, tmp_path / "adapter")
    assert (tmp_path / "adapter").read_bytes() == CONTENT
    proxy.cuts = 1
    assert await through.get(ref) == CONTENT
    assert proxy.gets == 4


async def test_a_download_that_is_always_cut_leaves_nothing(
    proxied: tuple[CuttingProxy, S3Store], store: S3Store, tmp_path: Path
) -> None:
    proxy, through = proxied
    ref = await store.put("blobs/sha256/x", CONTENT)
    proxy.cuts = 100
    with pytest.raises(StoreUnavailable, match="blobs/sha256/x"):
        await through.fetch(ref, tmp_path / "adapter")
    with pytest.raises(StoreUnavailable, match="blobs/sha256/x"):
        await through.get(ref)
    assert os.listdir(tmp_path) == []
    assert proxy.gets == 6


async def test_a_store_that_is_away_is_retryable(s3_server: S3Server) -> None:
    store = S3Store("http://127.0.0.1:1", s3_server.access_key, s3_server.secret_key, "any")
    with pytest.raises(StoreUnavailable, match=r"the object store at http://127\.0\.0\.1:1 did not answer"):
        await store.put("a", b"x")
    store.close()
