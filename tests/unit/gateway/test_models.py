"""Models, resolution and keys, asked with the openai package."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai.pagination import AsyncCursorPage
from openai.types import Model

from services.gateway.identity import Identity
from services.gateway.resolution import Resolver
from shared.catalog import api
from shared.errors import Retryable
from tests.unit.gateway.kit import BASE, FakeCatalog, Kit, smollm

ASK: Any = [{"role": "user", "content": "hi"}]


async def test_models_are_the_bases_and_the_live_policies(kit: Kit) -> None:
    models = [model async for model in kit.openai().models.list()]
    assert [model.id for model in models] == [BASE, "acme/adder", "beta/secret"]
    assert [model.owned_by for model in models] == ["base", "acme", "beta"]
    assert models[1].created == 1767323045
    assert models[1].model_extra is not None
    assert models[1].model_extra["revision"] == "acme/adder@2"


async def test_a_tenant_sees_its_own_policies_only(kit: Kit) -> None:
    assert [model.id async for model in kit.openai("key-acme").models.list()] == [BASE, "acme/adder"]


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
async def test_pages_put_together_are_the_whole_list(kit: Kit, limit: int) -> None:
    kit.catalog.names = [f"acme/p{i:03}" for i in range(7)] + ["acme/subber"]
    ids: list[str] = []
    after: str | None = None
    async with kit.http() as http:
        while True:
            page = (await http.get("/v1/models", params={"limit": limit} | ({"after": after} if after else {}))).json()
            assert len(page["data"]) <= limit
            ids += [model["id"] for model in page["data"]]
            if not page["has_more"]:
                break
            after = page["last_id"]
    assert ids == [BASE, *(f"acme/p{i:03}" for i in range(7))]


@pytest.mark.parametrize("limit", [1, 3, 8])
async def test_the_client_walks_all_pages_by_its_own_cursor_page(kit: Kit, limit: int) -> None:
    """`models.list()` of the openai package knows one page only; its cursor page follows `has_more` and `after`."""
    kit.catalog.names = [f"acme/p{i:03}" for i in range(7)] + ["acme/subber"]
    client = kit.openai()
    pages = client.get_api_list(
        "/models", page=AsyncCursorPage[Model], model=Model, options={"params": {"limit": limit}}
    )
    assert [model.id async for model in pages] == [BASE, *(f"acme/p{i:03}" for i in range(7))]
    first = await client.models.list(extra_query={"limit": limit})
    assert len(first.data) == limit
    assert first.model_extra is not None
    assert first.model_extra["has_more"] is (limit < 8)


async def test_a_page_asks_the_catalog_for_no_more_than_it_shows(kit: Kit) -> None:
    kit.catalog.names = [f"acme/p{i:04}" for i in range(2000)]
    async with kit.http() as http:
        page = (await http.get("/v1/models", params={"limit": 20, "after": "acme/p1499"})).json()
        assert [model["id"] for model in page["data"]] == [f"acme/p{i}" for i in range(1500, 1520)]
        assert page["has_more"] is True
        assert kit.catalog.calls == [("policies", (None, 21, None))]
        kit.catalog.calls.clear()
        assert len((await http.get("/v1/models", params={"limit": 1000})).json()["data"]) == 1000
        assert [call[1][1] for call in kit.catalog.calls] == [500, 500]
        assert (await http.get("/v1/models", params={"limit": 1001})).status_code == 400


async def test_retrieve_takes_bases_and_references_with_slashes(kit: Kit) -> None:
    client = kit.openai()
    assert (await client.models.retrieve(BASE)).owned_by == "base"
    model = await client.models.retrieve("acme/adder@3")
    assert (model.id, model.owned_by) == ("acme/adder@3", "acme")
    assert model.model_extra is not None
    assert model.model_extra["adapter_sha256"] == "3" * 64
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("acme/nobody")


@pytest.mark.parametrize(
    ("model", "near"),
    [
        ("acme/addr", "acme/adder"),
        ("acme/adder:canary", "acme/adder"),
        ("acme/adder@99", "acme/adder"),
        ("huggingfacetb/smollm2-135m-instruct", BASE),
        ("gpt-4o", None),
        ("acme/../adder", None),
        ("A" * 300, None),
    ],
)
async def test_an_unknown_policy_is_404_with_near_matches_and_never_the_base(
    kit: Kit, model: str, near: str | None
) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await kit.openai().chat.completions.create(model=model, messages=ASK)
    assert caught.value.code == "model_not_found"
    body: Any = caught.value.body
    if near is not None:
        assert near in body["near"]
        assert near in body["message"]
    assert len(body["message"]) < 400
    assert kit.sampler.requests == []


async def test_another_tenants_policy_is_unknown_and_not_even_near(kit: Kit) -> None:
    client = kit.openai("key-acme")
    messages = {}
    for model in ("beta/secret", "beta/nothing", "acme/secret"):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model=model, messages=ASK)
        messages[model] = str(caught.value.body).replace(model, "…")
        assert "beta/secret" not in messages[model]
    assert messages["beta/secret"] == messages["beta/nothing"]
    assert ("resolve", "beta/secret") not in kit.catalog.calls


async def test_each_request_is_resolved_afresh(kit: Kit) -> None:
    client = kit.openai()
    for live in (2, 1, 3, 2):
        kit.catalog.live = live
        raw = await client.chat.completions.with_raw_response.create(model="acme/adder", messages=ASK)
        assert raw.headers["mint-revision"] == f"acme/adder@{live}"


async def test_the_last_answer_serves_only_while_the_catalog_is_silent(kit: Kit) -> None:
    client = kit.openai()
    await client.chat.completions.create(model="acme/adder", messages=ASK)
    kit.catalog.live = 3
    kit.catalog.down = Retryable("connection refused")
    raw = await client.chat.completions.with_raw_response.create(model="acme/adder", messages=ASK)
    assert raw.headers["mint-resolution"] == "stale"
    assert raw.headers["mint-revision"] == "acme/adder@2"
    with pytest.raises(openai.InternalServerError, match="catalog does not answer") as caught:
        await client.chat.completions.create(model="acme/adder@3", messages=ASK)
    assert caught.value.status_code == 503
    assert "retry-after" in caught.value.response.headers
    base = await client.chat.completions.with_raw_response.create(model=BASE, messages=ASK)
    assert "mint-resolution" not in base.headers
    assert (await client.models.retrieve("acme/adder")).created == 0
    kit.catalog.down = None
    raw = await client.chat.completions.with_raw_response.create(model="acme/adder", messages=ASK)
    assert raw.headers["mint-revision"] == "acme/adder@3"
    assert "mint-resolution" not in raw.headers


async def test_a_remembered_policy_that_is_gone_is_not_served_stale(kit: Kit) -> None:
    client = kit.openai()
    await client.chat.completions.create(model="acme/adder", messages=ASK)
    names, kit.catalog.names = kit.catalog.names, ["acme/other"]
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="acme/adder", messages=ASK)
    kit.catalog.names, kit.catalog.down = names, Retryable("down")
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="acme/adder", messages=ASK)


async def test_a_hanging_catalog_counts_as_silent() -> None:
    class Hanging(FakeCatalog):
        async def resolve(self, reference: str) -> api.ResolvedRevision:
            await asyncio.sleep(60)
            raise AssertionError

    resolver = Resolver(Hanging(), {BASE: smollm()}, timeout_s=0.05)
    with pytest.raises(Retryable, match="cannot be resolved"):
        await resolver.target("acme/adder", Identity(None, "test"))


async def test_a_policy_without_a_live_revision_is_no_model(kit: Kit) -> None:
    async def nothing(reference: str) -> api.ResolvedRevision:
        return api.ResolvedRevision(
            reference=reference,
            base=BASE,
            revision=None,
            adapter_sha256=None,
            policy="acme/adder",
            alias="live",
            alias_version=None,
        )

    kit.catalog.resolve = nothing  # type: ignore[method-assign]
    with pytest.raises(openai.NotFoundError, match="no revision yet"):
        await kit.openai().chat.completions.create(model="acme/adder", messages=ASK)
    assert kit.sampler.requests == []
