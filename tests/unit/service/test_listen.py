"""The sockets that a service answers on."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from shared.catalog.http import KEPT_S
from shared.http import Health, HttpServer
from shared.ports import free_port
from shared.service import _listen
from shared.settings import CommonSettings


async def test_answers_are_sent_without_waiting_for_an_acknowledgement(tmp_path: Path) -> None:
    """An answer of two small writes else takes the 40 ms of the other side's delayed acknowledgement."""
    listener = _listen(CommonSettings(data_dir=tmp_path, port=free_port()))
    async with HttpServer(Health("listening"), listener) as server:
        reader, writer = await _connect(*listener.getsockname())
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: here\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 503")
        (connection,) = server._server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        writer.close()
        await writer.wait_closed()


async def test_an_idle_connection_is_closed_by_its_client_first(tmp_path: Path) -> None:
    """Closed by the server, it would now and then be closed under a request that is on its way."""
    listener = _listen(CommonSettings(data_dir=tmp_path, port=free_port()))
    async with HttpServer(Health("listening"), listener) as server:
        reader, writer = await _connect(*listener.getsockname())
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: here\r\n\r\n")
        await reader.readuntil(b"}")
        (connection,) = server._server.server_state.connections
        closing = connection.timeout_keep_alive_task
        assert closing is not None
        assert closing.when() - asyncio.get_running_loop().time() > KEPT_S
        writer.close()
        await writer.wait_closed()


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(10):
        while True:
            try:
                return await asyncio.open_connection(host, port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)
