"""Keys of the catalog at the edge, and /mint/v1/keys."""

from __future__ import annotations

import asyncio
import base64
import time

import pytest

from services.gateway import edge
from services.gateway.tokens import TTL_S, Tokens
from shared.catalog.keys import could_be_key, key_digest, key_id_of, new_key
from shared.errors import Refused
from tests.unit.gateway.kit import BASE, TOKENS, Kit


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_a_key_sees_what_is_its_tenants(kit: Kit, header: str) -> None:
    key = kit.book.made("acme")
    async with kit.http("", host="203.0.113.5") as http:
        sent = {header: f"Bearer {key}" if header == "authorization" else key}
        page = (await http.get("/mint/v1/policies", headers=sent)).json()
        foreign = await http.get("/mint/v1/policies/beta/secret", headers=sent)
        answered = await http.post("/v1/completions", json={"model": BASE, "prompt": "x"}, headers=sent)
    assert [item["policy"] for item in page["items"]] == ["acme/adder", "acme/subber"]
    assert foreign.status_code == 404
    assert answered.status_code == 200
    assert len(kit.book.asked) == 1


async def test_what_cannot_be_a_key_is_refused_without_asking(kit: Kit) -> None:
    for key in ("tml-x", "sk-proj-1", f"{new_key()}x", new_key().upper(), "x" * 4000):
        async with kit.http(key) as http:
            assert (await http.get("/v1/models")).status_code == 401
    assert kit.book.asked == []


async def test_a_revoked_key_is_told_so_and_which_it_is(kit: Kit) -> None:
    key = kit.book.made("acme")
    kit.book.revoked(key)
    async with kit.http(key) as http:
        answer = await http.get("/mint/v1/runs")
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert f"id {key_id_of(key_digest(key))}) was revoked" in answer.json()["error"]["message"]
    assert key not in answer.text


async def test_while_the_catalog_is_away_known_keys_work_marked_and_others_are_told_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(edge, "UNCHECKED_PAUSE_S", 0.0)
    kit = Kit()
    known = kit.book.made("acme")
    async with kit.http(known) as http:
        fresh = await http.get("/v1/models")
        assert kit.gateway.keys._ring is not None
        kit.gateway.keys._ring._fresh = 0.0
        kit.book.down = True
        stale = await http.get("/v1/models")
    async with kit.http(new_key()) as http:
        unknown = await http.get("/v1/models")
    async with kit.http("key-acme") as http:
        configured = await http.get("/v1/models")
    assert (fresh.status_code, fresh.headers.get("mint-key")) == (200, None)
    assert (stale.status_code, stale.headers.get("mint-key")) == (200, "stale")
    assert (configured.status_code, configured.headers.get("mint-key")) == (200, None)
    assert unknown.status_code == 503
    assert "cannot be checked" in unknown.json()["error"]["message"]
    assert int(unknown.headers["retry-after"]) >= 1


async def test_a_key_that_cannot_be_checked_is_told_so_late(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that wait for results ask again at once."""
    monkeypatch.setattr(edge, "UNCHECKED_PAUSE_S", 3600.0)
    key = kit.book.made("acme")
    kit.book.down = True
    async with kit.http(key) as http:
        asking = asyncio.create_task(http.get("/v1/models"))
        done, _ = await asyncio.wait({asking}, timeout=0.3)
        assert (kit.book.asked, done) == ([key_digest(key)], set())
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_key_is_shown_once_and_works_at_once_at_every_gateway(kit: Kit) -> None:
    other = Kit()
    other.book.views = kit.book.views
    async with kit.http() as http:
        made = await http.post("/mint/v1/keys", json={"tenant": "acme", "label": "nightly"})
        listed = await http.get("/mint/v1/keys", params={"tenant": "acme"})
    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    key = made.json()["key"]
    assert key.startswith("tml-")
    assert could_be_key(key)
    assert key not in listed.text
    (view,) = listed.json()["items"]
    assert view == {name: value for name, value in made.json().items() if name != "key"}
    assert (view["tenant"], view["label"], view["created_by"], view["revoked_at"]) == (
        "acme",
        "nightly",
        "key:local",
        None,
    )
    for gateway in (kit, other):
        async with gateway.http(key, host="203.0.113.5") as http:
            assert (await http.get("/mint/v1/runs")).status_code == 200


async def test_a_revoked_key_ends_and_its_first_revocation_stands(kit: Kit) -> None:
    async with kit.http() as http:
        made = (await http.post("/mint/v1/keys", json={"tenant": "acme", "kind": "sk"})).json()
        first = await http.delete(f"/mint/v1/keys/{made['key_id']}")
    async with kit.http("key-root") as http:
        again = await http.delete(f"/mint/v1/keys/{made['key_id']}")
        unknown = await http.delete(f"/mint/v1/keys/{'0' * 16}")
    assert made["key"].startswith("sk-")
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json()
    assert first.json()["revoked_by"] == "key:local"
    assert unknown.status_code == 404
    async with kit.http(made["key"]) as http:
        assert (await http.get("/mint/v1/runs")).status_code == 401


async def test_a_tenants_key_manages_no_keys(kit: Kit) -> None:
    key = kit.book.made("acme")
    for sent in (key, "key-acme"):
        async with kit.http(sent) as http:
            answers = [
                await http.get("/mint/v1/keys"),
                await http.post("/mint/v1/keys", json={"tenant": "acme"}),
                await http.delete(f"/mint/v1/keys/{key_id_of(key_digest(key))}"),
            ]
        assert [answer.status_code for answer in answers] == [403, 403, 403]
        assert "a key of all tenants" in answers[0].json()["error"]["message"]
    assert [view.revoked_at for view in kit.book.views.values()] == [None]


@pytest.mark.parametrize(
    "body", [{}, {"tenant": "*"}, {"tenant": "Acme"}, {"tenant": "acme", "kind": "xx"}, {"tenant": "acme", "role": "x"}]
)
async def test_a_key_for_nobody_is_refused_in_words(kit: Kit, body: dict[str, str]) -> None:
    async with kit.http() as http:
        answer = await http.post("/mint/v1/keys", json=body)
    assert answer.status_code == 422
    assert answer.json()["error"]["errors"]
    assert kit.book.views == {}


async def test_what_a_key_does_is_recorded_under_its_id(kit: Kit) -> None:
    key = kit.book.made("acme")
    async with kit.http(key) as http:
        await http.post("/mint/v1/policies/acme/adder/rollback")
    (_, (_, request)) = kit.catalog.calls[-1]
    assert request.actor == f"key:{key_id_of(key_digest(key))}"


async def test_a_token_is_its_key_and_ends_with_it(kit: Kit) -> None:
    key = kit.book.made("acme")
    token = TOKENS.issue(key_digest(key), time.time())
    async with kit.http("") as http:
        http.headers["x-api-key"] = token
        assert (await http.get("/mint/v1/policies/acme/adder")).status_code == 200
        assert (await http.get("/mint/v1/policies/beta/secret")).status_code == 404
    other = Kit()
    other.book.views = kit.book.views
    async with other.http(token) as http:
        assert (await http.get("/v1/models")).status_code == 200
    last = Kit()
    last.book.views = kit.book.views
    kit.book.revoked(key)
    async with last.http(token) as http:
        assert "was revoked" in (await http.get("/v1/models")).json()["error"]["message"]
    local = TOKENS.issue(key_digest("tml-dev"), time.time())
    async with kit.http(local) as here, kit.http(local, host="203.0.113.5") as far:
        assert (await here.get("/v1/models")).status_code == 200
        assert (await far.get("/v1/models")).status_code == 401


def test_a_token_says_when_it_was_made_and_when_it_ends() -> None:
    token = TOKENS.issue("a" * 64, 1000.5)
    assert TOKENS.read(token, 1000.0 + TTL_S - 0.1).sha256 == "a" * 64
    with pytest.raises(Refused, match="is over") as over:
        TOKENS.read(token, 1000.0 + TTL_S)
    assert (over.value.status, over.value.code) == (401, "invalid_token")


@pytest.mark.parametrize(
    "claims",
    [
        "", "AAAA", "W10", "eyJrZXkiOjF9", "eyJrZXkiOiJ0bWwtZGV2In0", "é", "W1tb" * 9000,
        "eyJleHAiOiAxZTk5OSwgImtleSI6ICJ0bWwtZGV2In0",
    ],
)  # fmt: skip
def test_a_token_of_somebody_elses_is_refused(claims: str) -> None:
    head, _, signature = TOKENS.issue("a" * 64, 0).split(".")
    with pytest.raises(Refused, match="not made here"):
        TOKENS.read(f"{head}.{claims}.{signature}", 1.0)


def test_a_token_does_not_tell_its_key_and_is_not_made_without_the_secret() -> None:
    key = new_key()
    token = TOKENS.issue(key_digest(key), 0, "key:1234", "acme")
    shown = b"".join(base64.urlsafe_b64decode(part + "==") for part in token.split("."))
    assert key.encode() not in shown
    assert b"acme" in shown
    for other in (Tokens("another secret"), Tokens("")):
        with pytest.raises(Refused, match="not made here"):
            TOKENS.read(other.issue(key_digest(key), 0), 1.0)


async def test_a_token_that_was_exchanged_for_another_ends_with_it(kit: Kit) -> None:
    """Whoever found one has it for its hour, and no longer."""
    key, now = kit.book.made("acme"), time.time()
    first = TOKENS.issue(key_digest(key), now - TTL_S + 60)
    async with kit.http(first) as http:
        second = (await http.post("/api/v1/auth/token", json={})).json()["jwt"]
    ends = [TOKENS.read(token, now).end for token in (first, second)]
    assert ends[0] == ends[1]


def test_no_two_keys_are_alike_and_each_has_256_bits() -> None:
    keys = {new_key(kind) for kind in ("tml", "sk") for _ in range(100)}
    assert len(keys) == 200
    assert {len(key.partition("-")[2]) for key in keys} == {43}
    assert all(could_be_key(key) for key in keys)
