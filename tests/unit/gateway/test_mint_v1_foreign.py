"""Another tenant's things do not exist: every operation of /mint/v1 in the published document, with a foreign id."""

from __future__ import annotations

from typing import Any

import pytest

from shared.catalog import api
from tests.unit.gateway.kit import BASE, Kit, run_view

FOREIGN = {
    "run_id": "r1",
    "tenant": "beta",
    "policy": "secret",
    "number": "1",
    "step": "1",
    "alias": "live",
    "evaluation_id": "r1:evaluation:last",
    "key_id": "0" * 16,
}
UNKNOWN = FOREIGN | {"run_id": "r2", "policy": "nobody", "evaluation_id": "r2:evaluation:last"}
CHANGES = {"pin", "cancel", "move_alias", "rollback", "register_data"}
FILTERS = [
    ("get", "/mint/v1/runs?tenant=beta"),
    ("get", "/mint/v1/policies?tenant=beta"),
    ("get", "/mint/v1/data?tenant=beta"),
    ("post", "/mint/v1/data?tenant=beta"),
    ("get", "/mint/v1/evaluations?run_id=r1"),
    ("get", "/mint/v1/evaluations?revision=beta/secret@1"),
    ("get", "/mint/v1/evaluations?run_id=mine&revision=beta/secret@1"),
]


def _operations() -> list[tuple[str, str]]:
    paths = Kit().app.openapi()["paths"]
    return [(method, path) for path, said in paths.items() if path.startswith("/mint/v1") for method in said]


def _kit() -> Kit:
    kit = Kit()
    kit.catalog.run_views["r1"] = run_view("r1", {"policy": "beta/secret"})
    kit.catalog.run_views["mine"] = run_view("mine", {"policy": "acme/adder"})
    view = api.EvaluationView(
        evaluation_id="r1:evaluation:last",
        run_id="r1",
        policy="beta/secret",
        base=BASE,
        revision="beta/secret@1",
        adapter_sha256=None,
        task_sha256="e" * 64,
        scorer="exact_match",
        sampling={},
        items=1,
        score=0.5,
        details={"key": "k", "sha256": "0" * 64, "size": 1},  # type: ignore[arg-type]
        created_at="2026-01-02T03:04:05Z",
    )
    kit.catalog.scores = [view]
    return kit


def test_the_table_is_whole() -> None:
    operations = _operations()
    assert len(operations) > 20
    named = {part for _, path in operations for part in path.split("/") if part.startswith("{")}
    assert named == {f"{{{name}}}" for name in FOREIGN}


@pytest.mark.parametrize(("method", "path"), [found for found in _operations() if "{" in found[1]])
async def test_a_foreign_id_is_404_in_the_words_for_an_unknown_one(method: str, path: str) -> None:
    kit = _kit()
    bodies: dict[str, Any] = {"{alias}": {"revision": "beta/secret@1"}, "pin": {"pinned": True}}
    last = path.rpartition("/")[2]
    body: dict[str, Any] = {"json": bodies[last]} if last in bodies else {}
    async with kit.http("key-acme") as http:
        foreign = await http.request(method, path.format(**FOREIGN), **body)
        unknown = await http.request(method, path.format(**UNKNOWN), **body)
    # Who may manage no keys is told so, whatever the id.
    expected = 403 if path.startswith("/mint/v1/keys") else 404
    assert foreign.status_code == unknown.status_code == expected
    words = foreign.text
    for name in ("run_id", "policy"):
        words = words.replace(FOREIGN[name], UNKNOWN[name])
    assert words == unknown.text
    assert not CHANGES & {name for name, _ in kit.catalog.calls}


@pytest.mark.parametrize(("method", "path"), FILTERS)
async def test_asking_for_another_tenants_is_404(method: str, path: str) -> None:
    kit = _kit()
    async with kit.http("key-acme") as http:
        answer = await http.request(method, path, content=b"x" if method == "post" else None)
    assert answer.status_code == 404
    assert "0.5" not in answer.text
    assert not CHANGES & {name for name, _ in kit.catalog.calls}


async def test_lists_ask_for_the_callers_tenant_alone() -> None:
    kit = _kit()
    async with kit.http("key-acme") as http:
        assert (await http.get("/mint/v1/runs", params={"policy": "beta/secret"})).status_code == 200
        assert (await http.get("/mint/v1/policies")).status_code == 200
        assert (await http.get("/mint/v1/data")).status_code == 200
    assert [what[0] for _, what in kit.catalog.calls] == ["acme", "acme", "acme"]


async def test_a_run_for_another_tenants_policy_is_not_asked_for() -> None:
    kit = _kit()
    method = {"kind": "sft", "data": {"kind": "task", "task": {"kind": "arithmetic"}}, "steps": 8}
    async with kit.http("key-acme") as http:
        answer = await http.post("/mint/v1/runs", json={"policy": "beta/secret", "base": BASE, "method": method})
    assert answer.status_code == 404
    assert kit.bus.published == []


async def test_the_owner_sees_each_of_them() -> None:
    kit = _kit()
    async with kit.http("key-root") as http:
        assert (await http.get("/mint/v1/runs/r1")).json()["policy"] == "beta/secret"
        assert (await http.get("/mint/v1/evaluations/r1:evaluation:last")).json()["score"] == 0.5
        assert (await http.get("/mint/v1/evaluations/r1:evaluation:base")).status_code == 404
        assert [it["score"] for it in (await http.get("/mint/v1/evaluations?run_id=r1")).json()] == [0.5]
