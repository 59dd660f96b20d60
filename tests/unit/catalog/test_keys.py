"""API keys in the catalog, over their routes: kept by sha256, bound to a tenant, ended for good."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request

from services.catalog.routes_keys import key_routes
from services.catalog.tables import KeyRow
from services.gateway.identity import Keys
from services.gateway.tokens import Tokens
from shared.catalog.keys import KeysClient, NewKey, RevokeKey, key_digest, key_id_of, new_key
from shared.errors import Refused
from tests.catalog_kit import Lab

TOKENS = Tokens("a secret of the stack")


@pytest.fixture
async def book(lab: Lab) -> AsyncIterator[KeysClient]:
    parts: Any = SimpleNamespace(database=lab.database, bases=lab.bases, clock=lab.clock)
    app = FastAPI()
    app.include_router(key_routes(parts))
    client = KeysClient("http://catalog", transport=httpx.ASGITransport(app))
    yield client
    await client.close()


def _new(key: str, tenant: str = "acme", **other: Any) -> NewKey:
    return NewKey(sha256=key_digest(key), tenant=tenant, actor="key:local", **other)


async def _refusal(work: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        await work
    return caught.value


async def test_a_key_is_recognised_by_its_sha256_alone(lab: Lab, book: KeysClient) -> None:
    key = new_key()
    made = await book.create(_new(key, label="nightly", kind="tml"))
    assert await book.verify(key_digest(key)) == made
    assert (made.key_id, made.tenant, made.label, made.created_by) == (
        key_id_of(key_digest(key)),
        "acme",
        "nightly",
        "key:local",
    )
    assert (await _refusal(book.verify(key_digest(new_key())))).status == 404
    (row,) = lab.rows(KeyRow)
    assert key not in str(vars(row))


async def test_a_lost_answer_may_be_asked_for_again(lab: Lab, book: KeysClient) -> None:
    key = new_key()
    assert await book.create(_new(key)) == await book.create(_new(key))
    assert len(lab.rows(KeyRow)) == 1
    refused = await _refusal(book.create(_new(key, tenant="beta")))
    assert (refused.status, refused.code) == (409, "key_exists")


async def test_a_revocation_is_final_and_the_row_stays(lab: Lab, book: KeysClient) -> None:
    key = new_key()
    made = await book.create(_new(key))
    first = await book.revoke(made.key_id, RevokeKey(actor="key:ann"))
    lab.clock.now += 60
    assert await book.revoke(made.key_id, RevokeKey(actor="key:bob")) == first
    assert (await book.create(_new(key))).revoked_at == first.revoked_at
    seen = await book.verify(key_digest(key))
    assert (seen.revoked_by, seen.revoked_at) == ("key:ann", first.revoked_at)
    assert seen.revoked_at is not None
    assert (await _refusal(book.revoke("0" * 16, RevokeKey(actor="key:ann")))).status == 404


@pytest.mark.parametrize("tenant", ["", "*", "Acme", "a/b", "-a", "a" * 64, "tiny", "a\n"])
async def test_a_key_belongs_to_what_can_be_a_tenant(lab: Lab, book: KeysClient, tenant: str) -> None:
    refused = await _refusal(book.create(_new(new_key(), tenant)))
    assert (refused.status, refused.code) == (400, "invalid_name")
    assert lab.rows(KeyRow) == []


async def test_keys_are_listed_newest_first_by_pages_and_tenant(book: KeysClient) -> None:
    made = [await book.create(_new(new_key(), "acme" if number % 2 else "beta")) for number in range(5)]
    seen, cursor = [], None
    while True:
        page = await book.list(limit=2, cursor=cursor)
        seen += page.items
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == made[::-1]
    assert (await book.list(tenant="acme")).items == [made[3], made[1]]
    assert (await book.list(tenant="other")).items == []
    assert (await _refusal(book.list(cursor="%%%"))).status == 400


async def test_a_gateway_knows_the_catalogs_keys(book: KeysClient) -> None:
    gateways, key = [Keys({}, "", book, tokens=TOKENS), Keys({}, "", book, tokens=TOKENS)], new_key("sk")
    made = await book.create(_new(key, kind="sk"))
    scope = {"type": "http", "headers": [(b"authorization", f"Bearer {key}".encode())], "client": ("203.0.113.5", 1)}
    for keys in gateways:
        identity = await keys.identify(Request(scope))
        assert (identity.tenant, identity.actor) == ("acme", f"key:{made.key_id}")
    await book.revoke(made.key_id, RevokeKey(actor="key:ann"))
    with pytest.raises(Refused, match="was revoked"):
        await Keys({}, "", book, tokens=TOKENS).identify(Request(scope))
