"""Health, metrics and settings of the service shell."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter
from pydantic import ValidationError

from shared.errors import Fatal
from shared.http import Health, HttpServer
from shared.ports import free_port
from shared.service import _listen
from shared.settings import CommonSettings
from shared.telemetry import current_traceparent


def bound() -> socket.socket:
    return _listen(CommonSettings(port=0))


async def test_health_says_what_it_waits_for_then_ok_then_why_not() -> None:
    health, listener, trouble = Health("learner"), bound(), list[str]()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    connected = [True]

    async def ping(timeout_s: float) -> bool:
        return connected[0]

    async with HttpServer(health, listener), httpx.AsyncClient(base_url=url, trust_env=False) as http:
        health.waiting_for = "the bus at nats://x"
        answer = await http.get("/healthz")
        assert (answer.status_code, answer.json()["waiting_for"]) == (503, "the bus at nats://x")
        health.ready(ping, lambda: trouble[0] if trouble else None)
        answer = await http.get("/healthz")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok", "service": "learner"})
        trouble.append("the engine is down")
        assert (await http.get("/healthz")).json()["waiting_for"] == "the engine is down"
        connected[0] = False
        assert (await http.get("/healthz")).json()["waiting_for"] == "the bus: the connection is lost"


async def test_routes_continue_the_trace_and_are_counted_by_route() -> None:
    router, listener = APIRouter(), bound()

    @router.get("/things/{number}")
    async def thing(number: int) -> dict[str, str | None]:
        return {"traceparent": current_traceparent()}

    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = HttpServer(Health("gateway"), listener)
    async with server, httpx.AsyncClient(base_url=url, trust_env=False) as http:
        server.app.include_router(router)
        answer = await http.get("/things/7", headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
        assert answer.json()["traceparent"].split("-")[1] == "a" * 32
        metrics = (await http.get("/metrics")).text
    assert 'mint_http_seconds_count{method="GET",route="/things/{number}",status="200"}' in metrics
    assert "things/7" not in metrics


def test_a_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(Fatal, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*; set MINT_PORT"):
            _listen(CommonSettings(port=port))


def test_free_ports_can_be_bound() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_settings_come_from_the_environment_and_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_NATS_URL", "nats://elsewhere:4222")
    monkeypatch.setenv("MINT_DATA_DIR", "/somewhere")
    settings = CommonSettings()
    assert (settings.nats_url, settings.data_dir) == ("nats://elsewhere:4222", Path("/somewhere"))
    assert settings.worker_id != CommonSettings().worker_id
    with pytest.raises(ValidationError):
        settings.nats_url = "other"
    monkeypatch.setenv("MINT_PORT", "70000")
    with pytest.raises(ValidationError, match="less than or equal to 65535"):
        CommonSettings()
