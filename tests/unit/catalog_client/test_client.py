"""What the catalog's answers become: values, Refused with its words, Retryable."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from mint_schemas import FileRef

from shared.catalog import api
from shared.catalog.client import CatalogClient
from shared.errors import Fatal, Refused, Retryable
from shared.telemetry import span

Answer = Callable[[httpx.Request], httpx.Response]


def client(answer: Answer) -> CatalogClient:
    return CatalogClient("http://catalog:1", transport=httpx.MockTransport(answer))


async def test_a_refusal_keeps_its_code_words_and_near_matches() -> None:
    body = {"error": {"code": "unknown_policy", "message": "no policy acme/ader", "near": ["acme/adder"]}}
    catalog = client(lambda request: httpx.Response(404, json=body))
    with pytest.raises(Refused, match="no policy acme/ader") as refused:
        await catalog.resolve("acme/ader")
    assert (refused.value.code, refused.value.near, refused.value.status) == ("unknown_policy", ["acme/adder"], 404)


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_a_failing_catalog_is_retryable(status: int) -> None:
    body = {"error": {"code": "busy", "message": "the database is locked"}}
    with pytest.raises(Retryable, match=rf"answered {status}: the database is locked"):
        await client(lambda request: httpx.Response(status, json=body)).run("r1")


async def test_a_catalog_that_is_away_is_retryable() -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(Retryable, match="the catalog does not answer: ConnectError refused"):
        await client(away).take(api.TakeRequest(command_id="r1:update:1", worker="w"))


async def test_a_refusal_of_no_known_form() -> None:
    with pytest.raises(Refused, match="<html>gone") as refused:
        await client(lambda request: httpx.Response(410, text="<html>gone")).run("r1")
    assert refused.value.code == "unknown"


async def test_an_answer_of_no_known_form() -> None:
    with pytest.raises(Fatal, match="answered GET /runs/r1 with what this build does not know"):
        await client(lambda request: httpx.Response(200, json={"run": 1})).run("r1")


async def test_paths_queries_and_trace() -> None:
    seen: list[tuple[str, str, Any]] = []
    ref = FileRef(key="data/acme/x", sha256="0" * 64, size=1)

    def answer(request: httpx.Request) -> httpx.Response:
        target = request.url.raw_path.decode()
        seen.append((request.method, target, json.loads(request.content) if request.content else None))
        assert "traceparent" in request.headers
        if "/data" in target:
            return httpx.Response(200, json=ref.model_dump())
        if target.endswith("limit=50") or "?tenant" in target:
            return httpx.Response(200, json={"items": []})
        return httpx.Response(200, json=[])

    catalog = client(answer)
    with span("a request"):
        assert (await catalog.runs(tenant="acme", state="running")).items == []
        assert (await catalog.revisions("acme/adder")).next_cursor is None
        assert await catalog.moves("acme/adder") == []
        assert await catalog.journal("../x", after=3) == []
        assert await catalog.register_data("acme", ref) == ref
    assert seen == [
        ("GET", "/internal/v1/runs?tenant=acme&state=running&limit=50", None),
        ("GET", "/internal/v1/policies/acme/adder/revisions?limit=50", None),
        ("GET", "/internal/v1/policies/acme/adder/moves", None),
        ("GET", "/internal/v1/runs/..%2Fx/journal?after=3", None),
        ("POST", "/internal/v1/data", {"tenant": "acme", **ref.model_dump()}),
    ]


async def test_a_revision_needs_a_number() -> None:
    with pytest.raises(ValueError, match="names no revision"):
        await client(lambda request: httpx.Response(200)).revision("acme/adder")
