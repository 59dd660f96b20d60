"""GET /v1/residency: every tier for a key of all tenants, its own policies for a tenant's."""

from __future__ import annotations

from typing import Any

from tests.unit.gateway.kit import BASE, Kit


def _report() -> dict[str, Any]:
    return {
        "replica": "smollm2-0",
        "boot_id": "boot-3",
        "base": BASE,
        "engine": "beta/secret@4 ended it",
        "restarts": 2,
        "in_flight": 5,
        "waiting": 2,
        "slot": ["acme/adder@2", "beta/secret@1"],
        "memory": [
            {"revision": "acme/adder@2", "adapter_sha256": "2" * 64, "pinned": True, "in_flight": 1, "bytes": 10},
            {"revision": "beta/secret@1", "adapter_sha256": "9" * 64, "pinned": False, "in_flight": 4, "bytes": 10},
        ],
        "disk": ["2" * 64, "9" * 64],
        "wanted": ["beta/secret@1", "acme/adder@2"],
        "loads": [{"revision": "beta/secret@2", "eta_s": 1.0}, {"revision": "acme/adder@3", "eta_s": 2.0}],
        "failed": {"beta/secret@3": "truncated", "acme/adder@1": "wrong base"},
        "evictions": ["beta/secret@9"],
    }


async def test_a_key_of_all_tenants_sees_what_the_replicas_say(kit: Kit) -> None:
    kit.tiers.reports = [_report(), _report() | {"replica": "smollm2-1"}]
    async with kit.http() as http:
        found = (await http.get("/v1/residency", params={"base": BASE})).json()
    assert found == {"object": "list", "data": kit.tiers.reports}
    assert kit.tiers.asked == [BASE]


async def test_a_tenant_sees_its_own_policies_and_no_sign_of_others(kit: Kit) -> None:
    kit.tiers.reports = [_report()]
    async with kit.http("key-acme") as http:
        answer = await http.get("/v1/residency")
    found = answer.json()["data"][0]
    assert found["slot"] == found["wanted"] == ["acme/adder@2"]
    assert [entry["revision"] for entry in found["memory"]] == ["acme/adder@2"]
    assert found["loads"] == [{"revision": "acme/adder@3", "eta_s": 2.0}]
    assert found["failed"] == {"acme/adder@1": "wrong base"}
    assert "disk" not in found
    assert found["engine"] == "down"
    assert "beta" not in answer.text
    assert "9" * 64 not in answer.text


async def test_a_replica_that_does_not_answer_is_listed_as_such(kit: Kit) -> None:
    kit.tiers.reports = [{"replica": "smollm2-0", "error": "connection refused by 10.0.0.7"}]
    for key, error in (("tml-dev", "connection refused by 10.0.0.7"), ("key-acme", "it does not answer")):
        async with kit.http(key) as http:
            found = (await http.get("/v1/residency")).json()["data"]
        assert found == [{"replica": "smollm2-0", "error": error}]


async def test_an_engine_that_is_up_is_up_for_everybody(kit: Kit) -> None:
    kit.tiers.reports = [_report() | {"engine": "up"}]
    for key in ("tml-dev", "key-acme"):
        async with kit.http(key) as http:
            assert (await http.get("/v1/residency")).json()["data"][0]["engine"] == "up"


async def test_it_needs_a_key(kit: Kit) -> None:
    async with kit.http("") as http:
        assert (await http.get("/v1/residency")).status_code == 401
