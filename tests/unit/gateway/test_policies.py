"""/mint/v1: policies, aliases, revisions, scores, data, status, and the published OpenAPI."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import AsyncIterator

import pytest

from shared.adapters.manifest import Manifest
from shared.catalog import api
from shared.errors import Refused, Retryable
from shared.residency import ReadyRevision, Replica
from tests.unit.gateway.kit import BASE, Kit, run_view


async def test_policies_are_listed_for_the_callers_tenant(kit: Kit) -> None:
    async with kit.http("key-acme") as http:
        page = (await http.get("/mint/v1/policies", params={"limit": 1})).json()
        assert [item["policy"] for item in page["items"]] == ["acme/adder"]
        rest = (await http.get("/mint/v1/policies", params={"cursor": page["next_cursor"]})).json()
        assert [item["policy"] for item in rest["items"]] == ["acme/subber"]
        assert (await http.get("/mint/v1/policies", params={"tenant": "beta"})).status_code == 404
    async with kit.http() as http:
        page = (await http.get("/mint/v1/policies", params={"tenant": "beta"})).json()
    assert [item["policy"] for item in page["items"]] == ["beta/secret"]


@pytest.mark.parametrize("rest", ["", "/revisions", "/moves", "/aliases/live", "/rollback"])
async def test_another_tenants_policy_does_not_exist(kit: Kit, rest: str) -> None:
    async with kit.http("key-acme") as http:
        post = rest in ("/aliases/live", "/rollback")
        body = {"revision": "beta/secret@1"} if rest == "/aliases/live" else {}
        path = f"/mint/v1/policies/beta/secret{rest}"
        answer = await (http.post(path, json=body) if post else http.get(path))
    assert answer.status_code == 404
    assert kit.catalog.calls == []


@pytest.mark.parametrize("name", ["Acme/adder", "acme/ad%20der", "acme/adder:live", "acme/adder@1", "acme/" + "a" * 64])
async def test_a_name_outside_the_grammar_is_refused_in_words(kit: Kit, name: str) -> None:
    async with kit.http() as http:
        answer = await http.get(f"/mint/v1/policies/{name}")
    assert answer.status_code == 400
    assert "policy name" in answer.json()["error"]["message"] or "each part" in answer.json()["error"]["message"]


async def test_show_policy_and_its_near_matches(kit: Kit) -> None:
    async with kit.http("key-acme") as http:
        assert (await http.get("/mint/v1/policies/acme/adder")).json()["aliases"] == {"live": "acme/adder@2"}
        unknown = await http.get("/mint/v1/policies/acme/addr")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["near"] == ["acme/adder"]
    assert "beta" not in unknown.text


async def test_moving_an_alias_and_rolling_back_name_the_actor(kit: Kit) -> None:
    async with kit.http("key-acme") as http:
        path = "/mint/v1/policies/acme/adder"
        moved = await http.post(f"{path}/aliases/canary", json={"revision": "acme/adder@3", "expected_version": 4})
        back = await http.post(f"{path}/rollback")
        to = await http.post(
            f"{path}/rollback", json={"to": "acme/adder@1", "alias": "canary", "timeout_s": 5, "force": True}
        )
    assert moved.json()["revision"] == "acme/adder@3"
    assert [moved.status_code, back.status_code, to.status_code] == [200, 200, 200]
    (_, (policy, alias, move)), (_, (_, plain)), (_, (_, exact)) = kit.catalog.calls
    assert (policy, alias, move.expected_version, move.reason) == ("acme/adder", "canary", 4, "manual")
    assert move.actor.startswith("key:")
    assert "key-acme" not in move.actor
    assert (plain.alias, plain.to) == ("live", None)
    assert (exact.alias, exact.to, exact.timeout_s, exact.force) == ("canary", "acme/adder@1", 5, True)
    assert (move.force, plain.force) == (False, False)


@pytest.mark.parametrize("revision", ["acme/adder", "acme/adder:live", "acme/other@1", "beta/secret@1"])
async def test_an_alias_points_at_a_revision_of_its_own_policy(kit: Kit, revision: str) -> None:
    async with kit.http() as http:
        move = await http.post("/mint/v1/policies/acme/adder/aliases/live", json={"revision": revision})
        back = await http.post("/mint/v1/policies/acme/adder/rollback", json={"to": revision})
    assert [move.status_code, back.status_code] == [400, 400]
    assert "acme/adder@N" in move.json()["error"]["message"]
    assert kit.catalog.calls == []


async def test_a_condition_that_did_not_hold_is_409_in_the_catalogs_words(kit: Kit) -> None:
    kit.catalog.down = Refused("alias live has version 9, 4 was expected", "alias_moved", [], 409)
    async with kit.http() as http:
        answer = await http.post("/mint/v1/policies/acme/adder/rollback")
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "alias_moved"


async def test_revisions_moves_and_scores(kit: Kit) -> None:
    common = {"base": BASE, "adapter_sha256": None, "task_sha256": "e" * 64, "scorer": "exact_match", "sampling": {}}
    kit.catalog.scores = [
        api.EvaluationView(
            evaluation_id=policy,
            run_id="r",
            policy=policy,
            revision=None,
            items=1,
            score=0.5,
            details={"key": "k", "sha256": "0" * 64, "size": 1},  # type: ignore[arg-type]
            created_at="2026-01-02T03:04:05Z",
            **common,  # type: ignore[arg-type]
        )
        for policy in ("acme/adder", "beta/secret")
    ]
    kit.catalog.run_views["r"] = run_view("r", {"policy": "acme/adder"})
    async with kit.http("key-acme") as http:
        page = (await http.get("/mint/v1/policies/acme/adder/revisions", params={"limit": 2})).json()
        scores = (await http.get("/mint/v1/evaluations", params={"run_id": "r"})).json()
        assert (await http.get("/mint/v1/evaluations")).status_code == 400
        assert (await http.get("/mint/v1/evaluations", params={"revision": "x"})).status_code == 422
        assert (await http.get("/mint/v1/policies/acme/adder/moves")).json() == []
        assert (await http.get(f"/mint/v1/revisions/acme/adder/{10**12}")).status_code == 422
    assert [item["number"] for item in page["items"]] == [2, 1]
    assert page["next_cursor"] == "1"
    assert [score["policy"] for score in scores] == ["acme/adder"]


async def test_a_revisions_manifest_and_archive_are_its_verified_files(kit: Kit) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"tensors" * 1000}
    for name, data in files.items():
        key = f"blobs/sha256/{hashlib.sha256(data).hexdigest()}"
        kit.catalog.manifest_files[name] = await kit.store.put(key, data)
    async with kit.http() as http:
        view = (await http.get("/mint/v1/revisions/acme/adder/1")).json()
        manifest = Manifest.model_validate((await http.get("/mint/v1/revisions/acme/adder/1/manifest")).json())
        archive = await http.get("/mint/v1/revisions/acme/adder/1/archive")
        await kit.store.delete(kit.catalog.manifest_files["adapter_config.json"].key)
        broken = await http.get("/mint/v1/revisions/acme/adder/1/archive")
    assert view["number"] == 1
    assert manifest.revision == "acme/adder@1"
    assert archive.headers["mint-adapter-sha256"] == "1" * 64
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        found = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]
    assert Manifest.model_validate_json(found.pop("manifest.json")) == manifest
    assert found == files
    assert broken.status_code == 500


async def test_uploaded_data_is_stored_under_its_hash_and_registered(kit: Kit) -> None:
    data = b'{"messages": []}\n' * 200_000

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 65536):
            yield data[start : start + 65536]

    async with kit.http("key-acme") as http:
        ref = (await http.post("/mint/v1/data", content=pieces())).json()
        again = (await http.post("/mint/v1/data", content=data)).json()
    sha256 = hashlib.sha256(data).hexdigest()
    assert ref == {"key": f"data/acme/{sha256}", "sha256": sha256, "size": len(data)}
    assert again == ref
    assert [call for call, _ in kit.catalog.calls] == ["register_data", "register_data"]
    assert await kit.store.size(ref["key"]) == len(data)


async def test_uploads_have_an_owner_a_bound_and_a_content() -> None:
    kit = Kit(gateway_max_upload_bytes=100)

    async def unannounced() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 10

    async with kit.http() as http:
        nobody = await http.post("/mint/v1/data", content=b"x")
        owned = await http.post("/mint/v1/data", params={"tenant": "acme"}, content=b"x")
        wrong = await http.post("/mint/v1/data", params={"tenant": "../x"}, content=b"x")
        long = await http.post("/mint/v1/data", params={"tenant": "acme"}, content=b"x" * 101)
        streamed = await http.post("/mint/v1/data", params={"tenant": "acme"}, content=unannounced())
        empty = await http.post("/mint/v1/data", params={"tenant": "acme"})
        form = await http.post("/mint/v1/data", params={"tenant": "acme"}, files={"file": b"x"})
    async with kit.http("key-acme") as http:
        foreign = await http.post("/mint/v1/data", params={"tenant": "beta"}, content=b"x")
    assert nobody.status_code == 400
    assert "?tenant=" in nobody.json()["error"]["message"]
    assert owned.status_code == 201
    assert [wrong.status_code, long.status_code, streamed.status_code] == [422, 413, 413]
    assert [empty.status_code, form.status_code, foreign.status_code] == [400, 415, 404]
    assert [call for call, _ in kit.catalog.calls] == ["register_data"]


async def test_status_shows_replicas_without_other_tenants_revisions(kit: Kit) -> None:
    ready = tuple(ReadyRevision(revision=r, adapter_sha256="1" * 64) for r in ("acme/adder@2", "beta/secret@2"))
    kit.replicas.alive = [
        Replica(
            replica="r0",
            boot_id="b",
            url="http://127.0.0.1:1",
            base=BASE,
            token="smollm2-135m",
            engine="vllm",
            dtype="bfloat16",
            max_rank=32,
            slots=4,
            max_resident=8,
            max_context=128,
            ready=ready,
            at=1.0,
        )
    ]
    async with kit.http("key-acme") as http:
        status = (await http.get("/mint/v1/status")).json()
        kit.catalog.down = Retryable("the catalog does not answer")
        silent = (await http.get("/mint/v1/status")).json()
        too_long = await http.post("/v1/completions", json={"model": BASE, "prompt": "x" * 120})
    assert status["catalog"] == "ok"
    assert status["bases"][0]["name"] == BASE
    assert status["bases"][0]["replicas"] == 1
    assert [found["revision"] for found in status["replicas"][0]["ready"]] == ["acme/adder@2"]
    assert "url" not in status["replicas"][0]
    assert silent["catalog"] == "the catalog does not answer"
    assert "context is 128" in too_long.json()["error"]["message"]


async def test_openapi_describes_every_route(kit: Kit) -> None:
    paths = kit.app.openapi()["paths"]
    assert {"/v1/models", "/v1/chat/completions", "/v1/completions", "/mint/v1/runs", "/mint/v1/data"} <= set(paths)
    assert "/mint/v1/runs/{run_id}/progress" in paths
    assert "Submission" in str(paths["/mint/v1/runs"]["post"]["requestBody"])
    assert "ChatRequest" in str(paths["/v1/chat/completions"]["post"]["requestBody"])
