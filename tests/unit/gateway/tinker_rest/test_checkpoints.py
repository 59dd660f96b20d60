"""Checkpoints: published, given an expiry, deleted, copied, described; whatever they are called."""

from __future__ import annotations

import pytest
from mint_schemas.training import Lora

from tests.unit.gateway.tinker_rest.kit import AT, BASE, RUN, World

ONE = f"/api/v1/training_runs/{RUN}/checkpoints"
CLIENT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("name", ["step-1", "publish", "archive", "ttl", "a b", "weights", "ü:1"])
async def test_a_checkpoint_is_published_given_an_expiry_and_deleted(world: World, name: str) -> None:
    path = world.operations.add_path(name).path
    views = world.operations.path_views
    async with world.http() as http:
        url = f"{ONE}/weights/{name}"
        published = await http.post(f"{url}/publish")
        assert views[path].published
        withdrawn = await http.delete(f"{url}/publish")
        assert not views[path].published
        kept = await http.put(f"{url}/ttl", json={"ttl_seconds": 7200})
        assert views[path].expires_at == AT + 7200
        forever = await http.put(f"{url}/ttl", json={"ttl_seconds": None})
        assert views[path].expires_at is None
        deleted = await http.delete(url)
        again = await http.delete(url)
    assert [a.status_code for a in (published, withdrawn, kept, forever, deleted)] == [204] * 5
    assert views == {}
    assert again.status_code == 404


async def test_only_its_owner_changes_a_published_checkpoint(world: World) -> None:
    path = world.operations.add_path("x", published=True)
    async with world.http("key-beta") as http:
        read = await http.post("/api/v1/weights_info", json={"tinker_path": path.path})
        answers = [
            await http.delete(f"{ONE}/weights/x"),
            await http.post(f"{ONE}/weights/x/publish"),
            await http.delete(f"{ONE}/weights/x/publish"),
            await http.put(f"{ONE}/weights/x/ttl", json={"ttl_seconds": 3600}),
        ]
    assert read.status_code == 200
    assert [answer.status_code for answer in answers] == [404] * 4
    assert world.operations.path_views == {path.path: path}


@pytest.mark.parametrize("body", [{}, {"ttl_seconds": 0}, {"ttl_seconds": -5}, {"ttl_seconds": "x"}, {"seconds": 5}])
async def test_an_expiry_is_seconds_from_now_or_null(world: World, body: dict[str, object]) -> None:
    world.operations.add_path("x")
    async with world.http() as http:
        answer = await http.put(f"{ONE}/weights/x/ttl", json=body)
    assert answer.status_code == 422
    assert answer.json()["category"] == "user"


@pytest.mark.parametrize("checkpoint", ["optimizer/x", "checkpoint/%2E%2E", "weights/%2E%2E", "sampler_weights/%20"])
async def test_what_is_no_checkpoint_id_is_refused_in_words(world: World, checkpoint: str) -> None:
    async with world.http() as http:
        answer = await http.post(f"{ONE}/{checkpoint}/publish")
    assert answer.status_code in (400, 404)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "weights/x",
        "tinker://",
        "tinker://r/weights",
        "tinker://r/weights/",
        "tinker://r/weights/../x",
        "tinker://r/weights/..",
        "tinker://../weights/x",
        "tinker:///weights/x",
        "tinker://r/optimizer/x",
        "tinker://r/weights/x/y",
        "tinker://r/weights/x\ny",
        "mint://teacher",
        "tinker://r/weights/" + "x" * 300,
    ],
)
async def test_a_path_outside_the_grammar_is_refused_before_the_catalog_is_asked(world: World, path: str) -> None:
    async with world.http() as http:
        answer = await http.post("/api/v1/weights_info", json={"tinker_path": path})
    assert answer.status_code == 400
    assert answer.json()["code"] == "invalid_path"


async def test_weights_info_says_what_was_trained(world: World) -> None:
    lora = Lora(rank=8, target_modules=CLIENT_TARGETS)
    everything = world.operations.add_path("all", lora=lora, train_unembed=True)
    attention = world.operations.add_path("attention", lora=Lora(rank=4, target_modules=CLIENT_TARGETS[:4]))
    async with world.http() as http:
        first = (await http.post("/api/v1/weights_info", json={"tinker_path": everything.path})).json()
        second = (await http.post("/api/v1/weights_info", json={"tinker_path": attention.path})).json()
        unknown = await http.post("/api/v1/weights_info", json={"tinker_path": f"tinker://{RUN}/weights/none"})
    note = first.pop("note")
    assert first == {
        "base_model": BASE,
        "is_lora": True,
        "lora_rank": 8,
        "train_unembed": False,
        "train_mlp": True,
        "train_attn": True,
    }
    assert "not trained" in note
    assert (second["train_mlp"], second["train_attn"], second["lora_rank"], second["note"]) == (False, True, 4, None)
    assert unknown.status_code == 404


async def test_a_copy_has_a_run_of_its_own_in_a_session_that_is_over(world: World) -> None:
    source = world.operations.add_path("best", "sampler_weights", published=True, revision="acme/p@1")
    body = {"source_path": source.path, "destination_project_id": "archive", "ttl_seconds": 3600}
    async with world.http("key-beta") as http:
        answer = await http.post("/api/v1/copy_weights", json=body)
    path = answer.json()["tinker_path"]
    copy = world.operations.path_views[path]
    assert path.endswith("/sampler_weights/best")
    assert (copy.tenant, copy.revision, copy.published, copy.expires_at) == ("beta", "acme/p@1", False, AT + 3600)
    assert world.operations.path_views[source.path] == source
    session = world.operations.session_views[copy.model_id.split(":")[0]]
    assert session.user_metadata == {"destination_project_id": "archive"}
    assert world.operations.finished == [session.session_id]


async def test_a_copy_goes_into_the_slot_that_is_named(world: World) -> None:
    source = world.operations.add_path("x")
    world.operations.add_session("s7")
    async with world.http() as http:
        body = {"source_path": source.path, "session_id": "s7", "model_seq_id": 3}
        answer = await http.post("/api/v1/copy_weights", json=body)
        half = await http.post("/api/v1/copy_weights", json={"source_path": source.path, "session_id": "s7"})
    assert answer.json() == {"tinker_path": "tinker://s7:train:3/weights/x"}
    assert world.operations.finished == []
    assert half.status_code == 422


async def test_a_copy_asked_for_again_is_the_same_copy(world: World) -> None:
    """Clients repeat what they got no answer to, under the same key."""
    source = world.operations.add_path("best", "sampler_weights", revision="acme/p@1")
    body = {"source_path": source.path, "destination_project_id": "archive"}
    async with world.http() as http:
        answers = [
            await http.post("/api/v1/copy_weights", json=body, headers={"x-idempotency-key": key})
            for key in ("one", "one", "another")
        ]
    paths = [answer.json()["tinker_path"] for answer in answers]
    assert paths[0] == paths[1] != paths[2]
    assert len(world.operations.session_views) == 2


async def test_a_slot_that_has_the_copy_already_answers_it_and_another_checkpoint_does_not_take_it(
    world: World,
) -> None:
    await world.training_path("x")
    source, other = world.operations.path_views[f"tinker://{RUN}/weights/x"], await world.training_path("y", seed=4)
    world.operations.add_session("s7")
    body = {"source_path": source.path, "session_id": "s7", "model_seq_id": 3}
    async with world.http() as http:
        first, again = [await http.post("/api/v1/copy_weights", json=body) for _ in range(2)]
        target = first.json()["tinker_path"]
        taken = world.operations.path_views[target].model_copy(update={"checkpoint": other.checkpoint})
        world.operations.path_views[target] = taken
        refused = await http.post("/api/v1/copy_weights", json=body)
    assert again.json() == first.json()
    assert (refused.status_code, refused.json()["code"]) == (409, "path_taken")


async def test_copies_read_what_the_caller_may_read_and_no_foreign_token(world: World) -> None:
    source = world.operations.add_path("x")
    async with world.http("key-beta") as http:
        private = await http.post("/api/v1/copy_weights", json={"source_path": source.path})
    async with world.http() as http:
        body = {"source_path": source.path, "destination_project_id": "p"}
        token = await http.post("/api/v1/copy_weights", json=body, headers={"x-tinker-weights-access-token": "t"})
    assert private.status_code == 404
    assert (token.status_code, token.json()["code"]) == (400, "unsupported")
    assert world.operations.session_views == {}
