"""Training runs and sessions, listed and shown: the fields, types and pages that the public clients read."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tests.unit.gateway.tinker_rest.kit import AT, BASE, RUN, World

RUN_FIELDS = {
    "training_run_id": str,
    "base_model": str,
    "model_owner": str,
    "is_lora": bool,
    "lora_rank": int,
    "corrupted": bool,
    "last_request_time": str,
}
CHECKPOINT_FIELDS = {
    "checkpoint_id": str,
    "checkpoint_type": str,
    "time": str,
    "tinker_path": str,
    "size_bytes": int,
    "public": bool,
}


async def test_a_run_has_the_fields_that_clients_read(world: World) -> None:
    world.operations.add_model(user_metadata={"purpose": "adding"})
    world.operations.add_path("first")
    world.operations.add_path("second", expires_at=AT + 3600)
    world.operations.add_path("served", "sampler_weights", published=True)
    async with world.http() as http:
        run = (await http.get(f"/api/v1/training_runs/{RUN}", params={"access_scope": "accessible"})).json()
    assert {name: type(run[name]) for name in RUN_FIELDS} == RUN_FIELDS
    assert (run["training_run_id"], run["base_model"], run["model_owner"]) == (RUN, BASE, "acme")
    assert (run["is_lora"], run["lora_rank"], run["user_metadata"]) == (True, 2, {"purpose": "adding"})
    assert datetime.fromisoformat(run["last_request_time"]) == datetime.fromtimestamp(AT + 1, UTC)
    last, sampler = run["last_checkpoint"], run["last_sampler_checkpoint"]
    assert {name: type(last[name]) for name in CHECKPOINT_FIELDS} == CHECKPOINT_FIELDS
    assert (last["checkpoint_id"], last["checkpoint_type"]) == ("weights/second", "training")
    assert last["tinker_path"] == f"tinker://{RUN}/weights/second"
    assert datetime.fromisoformat(last["expires_at"]).timestamp() == AT + 3600
    assert (sampler["checkpoint_id"], sampler["checkpoint_type"]) == ("sampler_weights/served", "sampler")
    assert (sampler["public"], sampler["expires_at"]) == (True, None)


async def test_a_run_without_checkpoints_says_none(world: World) -> None:
    world.operations.add_model()
    async with world.http() as http:
        run = (await http.get(f"/api/v1/training_runs/{RUN}")).json()
    assert (run["last_checkpoint"], run["last_sampler_checkpoint"]) == (None, None)


async def test_pages_of_runs_put_together_are_the_list(world: World) -> None:
    for number in range(250):
        world.operations.add_model(f"s1:train:{number}", at=AT + number)
    world.operations.add_model("s9:train:0", tenant="beta")
    async with world.http() as http:
        whole = (await http.get("/api/v1/training_runs", params={"limit": 1000})).json()
        pages = [
            (await http.get("/api/v1/training_runs", params={"limit": 120, "offset": offset})).json()
            for offset in (0, 120, 240)
        ]
        default = (await http.get("/api/v1/training_runs")).json()
    assert [len(page["training_runs"]) for page in pages] == [120, 120, 10]
    assert [run for page in pages for run in page["training_runs"]] == whole["training_runs"]
    assert whole["training_runs"][0]["training_run_id"] == "s1:train:249"
    assert whole["cursor"] == {"offset": 0, "limit": 1000, "total_count": 250}
    assert pages[2]["cursor"] == {"offset": 240, "limit": 120, "total_count": 250}
    assert default["cursor"]["limit"] == len(default["training_runs"]) == 20


async def test_another_tenants_run_does_not_exist_and_the_development_key_sees_all(world: World) -> None:
    world.operations.add_model()
    world.operations.add_path("x", published=True)
    async with world.http("key-beta") as http:
        shown = await http.get(f"/api/v1/training_runs/{RUN}")
        listed = await http.get(f"/api/v1/training_runs/{RUN}/checkpoints")
        runs = (await http.get("/api/v1/training_runs")).json()
    async with world.http("tml-dev") as http:
        all_runs = (await http.get("/api/v1/training_runs")).json()
    assert [shown.status_code, listed.status_code] == [404, 404]
    assert (runs["training_runs"], runs["cursor"]["total_count"]) == ([], 0)
    assert [run["training_run_id"] for run in all_runs["training_runs"]] == [RUN]


async def test_checkpoints_of_a_run_are_all_listed(world: World) -> None:
    world.operations.add_model()
    for number in range(130):
        world.operations.add_path(f"{number:06d}")
    world.operations.add_path("other", model_id="s1:train:1")
    async with world.http() as http:
        listed = (await http.get(f"/api/v1/training_runs/{RUN}/checkpoints")).json()
    assert [c["checkpoint_id"] for c in listed["checkpoints"]] == [f"weights/{number:06d}" for number in range(130)]
    assert listed["cursor"] is None


async def test_checkpoints_of_the_tenant_are_newest_first_in_pages(world: World) -> None:
    world.operations.add_path("a")
    world.operations.add_path("b", model_id="s1:train:1")
    world.operations.add_path("c", "sampler_weights")
    world.operations.add_path("d", tenant="beta", published=True)
    async with world.http() as http:
        page = (await http.get("/api/v1/checkpoints", params={"limit": 2})).json()
        rest = (await http.get("/api/v1/checkpoints", params={"limit": 2, "offset": 2})).json()
    assert [c["checkpoint_id"] for c in page["checkpoints"]] == ["sampler_weights/c", "weights/b"]
    assert [c["tinker_path"] for c in rest["checkpoints"]] == [f"tinker://{RUN}/weights/a"]
    assert page["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}


@pytest.mark.parametrize(
    "query", [{"limit": 0}, {"limit": 100_000}, {"offset": -1}, {"limit": "x"}, {"access_scope": "mine"}]
)
async def test_a_page_outside_the_bounds_is_refused_in_words(world: World, query: dict[str, object]) -> None:
    async with world.http() as http:
        answer = await http.get("/api/v1/training_runs", params=query)
    assert answer.status_code == 422
    assert next(iter(query)) in answer.json()["detail"]


@pytest.mark.parametrize("run_id", ["..%2F..%2Fetc", "%2E%2E", "a%2Fb", "%20", "x%00y", "a" * 250])
async def test_what_is_no_run_id_is_a_clear_error(world: World, run_id: str) -> None:
    async with world.http() as http:
        answer = await http.get(f"/api/v1/training_runs/{run_id}")
    assert answer.status_code in (400, 404)


async def test_sessions_are_ids_and_a_session_names_its_runs_and_samplers(world: World) -> None:
    for number, tenant in ((1, "acme"), (2, "beta"), (3, "acme")):
        world.operations.add_session(
            f"s{number}",
            tenant,
            user_metadata={"display_name": "nightly"},
            model_ids=(f"s{number}:train:0",),
            sampler_ids=(f"s{number}:sample:0",),
        )
    async with world.http() as http:
        listed = (await http.get("/api/v1/sessions", params={"limit": 20, "access_scope": "owned"})).json()
        shown = (await http.get("/api/v1/sessions/s3", params={"access_scope": "owned"})).json()
        foreign = await http.get("/api/v1/sessions/s2")
    assert listed == {"sessions": ["s1", "s3"]}
    assert shown == {
        "training_run_ids": ["s3:train:0"],
        "sampler_ids": ["s3:sample:0"],
        "user_metadata": {"display_name": "nightly"},
        "display_name": "nightly",
    }
    assert foreign.status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "sessions/s1/trace_export"),
        ("POST", "sessions/search"),
        ("PUT", "sessions/s1/project"),
        ("GET", "audit"),
        ("GET", "billing/usage/events"),
        ("GET", "billing/usage/checkpoints/current"),
        ("GET", f"training_runs/{RUN}/checkpoints/external_weights/x/external_weights_urls"),
        ("GET", "training_runs?project_id=p"),
    ],
)
async def test_what_is_not_offered_says_so_and_is_not_retried(world: World, method: str, path: str) -> None:
    async with world.http() as http:
        answer = await http.request(method, f"/api/v1/{path}")
    assert answer.status_code == 400
    assert answer.json()["code"] == "unsupported"
    assert answer.json()["category"] == "user"
