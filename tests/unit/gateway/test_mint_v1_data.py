"""/mint/v1/data: what was uploaded is listed, for its tenant."""

from __future__ import annotations

from tests.unit.gateway.kit import Kit


async def test_a_tenants_files_are_listed_as_they_are_named_in_requests(kit: Kit) -> None:
    async with kit.http("key-acme") as http:
        refs = [(await http.post("/mint/v1/data", content=text)).json() for text in (b"one", b"two", b"one")]
        page = (await http.get("/mint/v1/data")).json()
        first = (await http.get("/mint/v1/data", params={"limit": 1})).json()
    assert [{name: item[name] for name in ("key", "sha256", "size")} for item in page["items"]] == sorted(
        refs[:2], key=lambda ref: ref["sha256"]
    )
    assert all(item["created_at"] for item in page["items"])
    assert len(first["items"]) == 1


async def test_a_key_of_all_tenants_says_whose(kit: Kit) -> None:
    async with kit.http() as http:
        nobody = await http.get("/mint/v1/data")
        others = await http.get("/mint/v1/data", params={"tenant": "beta"})
    assert nobody.status_code == 400
    assert "?tenant=" in nobody.json()["error"]["message"]
    assert others.json() == {"items": [], "next_cursor": None}
    assert kit.catalog.calls == [("list_data", ("beta", 50, None))]
