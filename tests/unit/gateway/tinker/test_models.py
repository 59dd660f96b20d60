"""Models: begun from a base or from a checkpoint, described, unloaded; saves and loads."""

from __future__ import annotations

from typing import Any

import pytest
from mint_schemas.training import Lora

from shared.errors import Refused
from tests.unit.gateway.kit import BASE
from tests.unit.gateway.tinker.kit import Scene

PATH = "tinker://session-9:train:0/weights/first"


async def test_a_model_is_begun_and_described(scene: Scene) -> None:
    answer = await scene.post("create_model", scene.model(1, seed=2**64 - 1))
    assert answer.json()["model_id"] == f"{scene.session_id}:train:1"
    done = (await scene.retrieve(answer)).json()
    assert done == {"type": "create_model", "model_id": f"{scene.session_id}:train:1"}
    asked = scene.kit.operations.new_models[-1]
    assert asked.lora == Lora(rank=8, alpha=32.0)
    assert asked.seed == 2**63 - 1
    info = (await scene.post("get_info", {"model_id": scene.model_id, "type": "get_info"})).json()
    assert info["model_data"] == {"model_name": BASE, "tokenizer_id": BASE}
    assert (info["is_lora"], info["lora_rank"], info["model_name"]) == (True, 8, BASE)


async def test_the_output_layer_is_said_not_to_be_trained(scene: Scene) -> None:
    answer = await scene.post("create_model", scene.model(1, train_unembed=True))
    assert "not trained" in answer.json()["note"]
    assert scene.kit.operations.new_models[-1].train_unembed is True
    without = await scene.post("create_model", scene.model(2, train_unembed=False))
    assert "note" not in without.json()


@pytest.mark.parametrize(
    ("attn", "mlp", "targets"),
    [
        (True, False, ("q_proj", "k_proj", "v_proj", "o_proj")),
        (False, True, ("gate_proj", "up_proj", "down_proj")),
    ],
)
async def test_train_flags_choose_the_modules(scene: Scene, attn: bool, mlp: bool, targets: tuple[str, ...]) -> None:
    await scene.post("create_model", scene.model(1, train_attn=attn, train_mlp=mlp))
    assert scene.kit.operations.new_models[-1].lora.target_modules == targets


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora_config": {"rank": 33}}, "32"),
        ({"lora_config": {"rank": 0}}, "rank"),
        ({"lora_config": {"rank": 8, "train_attn": False, "train_mlp": False}}, "train_unembed alone"),
        ({"base_model": "HuggingFaceTB/SmolLM2-135M"}, "there is no base model"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "dimuon"),
        ({"lora_config": None}, "lora_config"),
        ({"model_seq_id": -1}, "model_seq_id"),
        ({"model_seq_id": "0"}, "model_seq_id"),
        ({"dropout": 0.1}, "dropout"),
        ({"session_id": "../x"}, "session id"),
    ],
)
async def test_what_cannot_be_trained_is_refused(scene: Scene, change: dict[str, Any], words: str) -> None:
    answer = await scene.post("create_model", scene.model(1) | change)
    assert answer.status_code in (400, 422)
    assert words in answer.json()["error"]
    assert len(scene.kit.operations.new_models) == 1


async def test_the_same_number_again_is_the_same_model_and_other_content_a_conflict(scene: Scene) -> None:
    first, again = [await scene.post("create_model", scene.model(1)) for _ in range(2)]
    other = await scene.post("create_model", scene.model(1, rank=4))
    assert first.json() == again.json()
    assert other.status_code == 409
    assert other.headers["x-should-retry"] == "false"


async def test_an_adamw_config_is_what_there_is(scene: Scene) -> None:
    answer = await scene.post("create_model", scene.model(1) | {"optimizer_config": {"type": "adamw"}})
    assert answer.status_code == 200


async def test_a_model_is_unloaded_once(scene: Scene) -> None:
    first, again = [await scene.post("unload_model", {"model_id": scene.model_id}) for _ in range(2)]
    assert first.json()["request_id"] == again.json()["request_id"]
    assert (await scene.retrieve(first)).json() == {"type": "unload_model", "model_id": scene.model_id}


async def test_saves_answer_with_their_paths(scene: Scene) -> None:
    place = {"model_id": scene.model_id, "path": "step-1", "type": "save_weights", "ttl_seconds": 3600}
    saved = await scene.result("save_weights", place | {"seq_id": 1, "overwrite": True})
    assert saved == {"type": "save_weights", "path": f"tinker://{scene.model_id}/weights/step-1"}
    asked = await scene.kit.operations.payload(scene.kit.operations.submits[-1])
    assert (asked.name, asked.ttl_s, asked.overwrite) == ("step-1", 3600.0, True)
    named = await scene.result("save_weights_for_sampler", {"model_id": scene.model_id, "seq_id": 2, "path": "a"})
    assert named == {"type": "save_weights_for_sampler", "path": f"tinker://{scene.model_id}/sampler_weights/a"}
    body = {"model_id": scene.model_id, "seq_id": 3, "sampling_session_seq_id": 0, "kind": "snapshot"}
    ephemeral = await scene.result("save_weights_for_sampler", body)
    assert ephemeral == {
        "type": "save_weights_for_sampler",
        "sampling_session_id": f"{scene.model_id}:sampler:0",
    }


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("save_weights", {}, "path: is required"),
        ("save_weights", {"path": "../../x"}, "checkpoint name"),
        ("save_weights", {"path": ".."}, "checkpoint name"),
        ("save_weights", {"path": "a/b"}, "checkpoint name"),
        ("save_weights", {"path": "a", "ttl_seconds": 0}, "ttl_seconds"),
        ("save_weights", {"path": "a", "user_metadata": {"a": "b"}}, "user_metadata"),
        ("save_weights_for_sampler", {}, "exactly one"),
        ("save_weights_for_sampler", {"path": "a", "sampling_session_seq_id": 1}, "exactly one"),
        ("save_weights_for_sampler", {"path": "a", "kind": "inflight"}, "inflight"),
        ("save_weights_external", {"path": "a", "type": "save_weights_external"}, "save_weights_external"),
        ("load_weights", {"path": PATH, "optimizer": True, "weights_access_token": "t"}, "weights_access_token"),
        ("load_weights", {"path": "weights/x", "optimizer": True}, "checkpoint path"),
        ("load_weights", {"path": "tinker://m/weights/..", "optimizer": True}, "checkpoint name"),
        ("optim_step", {"adam_params": {"learning_rate": -1.0}}, "adam_params.learning_rate"),
        ("optim_step", {"adam_params": {"amsgrad": True}}, "adam_params.amsgrad"),
        ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}, "dimuon"),
        ("optim_step", {}, "adam_params: is required"),
    ],
)
async def test_content_that_is_not_allowed_fails_and_uses_its_number(
    scene: Scene, path: str, body: dict[str, Any], words: str
) -> None:
    failed = await scene.result(path, {"model_id": scene.model_id, "seq_id": 1, **body})
    assert failed["category"] == "user"
    assert words in failed["error"]
    await scene.next_is_served(2)


async def test_weights_are_loaded_onto_a_model(scene: Scene) -> None:
    body = {"model_id": scene.model_id, "seq_id": 1, "path": PATH, "optimizer": True}
    loaded = await scene.result("load_weights", body)
    assert loaded == {"type": "load_weights", "model_id": scene.model_id, "path": PATH}
    asked = await scene.kit.operations.payload(scene.kit.operations.submits[-1])
    assert (asked.path, asked.optimizer) == (PATH, True)


async def test_a_path_that_is_not_there_fails_and_uses_its_number(scene: Scene) -> None:
    scene.kit.operations.refusals["load_weights"] = Refused(f"there is no {PATH}", "not_found", status=404)
    body = {"model_id": scene.model_id, "seq_id": 1, "path": PATH, "optimizer": True}
    failed = await scene.result("load_weights", body)
    assert failed == {"error": f"there is no {PATH}", "category": "user"}
    assert (await scene.post("load_weights", body | {"model_id": "foreign"})).status_code == 404
    await scene.next_is_served(2)


async def test_a_model_is_begun_from_a_checkpoint_with_its_shape(scene: Scene) -> None:
    lora = Lora(rank=4, alpha=32.0, target_modules=("q_proj",))
    scene.kit.operations.add_path(PATH, "acme", BASE, lora)
    body = {"session_id": scene.session_id, "model_seq_id": 5, "path": PATH, "optimizer": False}
    loaded = await scene.result("load_weights", body)
    assert loaded["model_id"] == f"{scene.session_id}:train:5"
    assert loaded["type"] == "load_weights"
    asked = scene.kit.operations.new_models[-1]
    assert (asked.lora, asked.path, asked.optimizer, asked.base) == (lora, PATH, False, BASE)
    other = await scene.post("load_weights", body | {"model_seq_id": 6, "base_model": "another"})
    assert other.status_code == 422
    unknown = await scene.post("load_weights", body | {"model_seq_id": 6, "path": PATH + "-no"})
    assert unknown.status_code == 404


@pytest.mark.parametrize(
    "place",
    [
        {},
        {"model_id": "m"},
        {"seq_id": 1},
        {"session_id": "s"},
        {"model_id": "m", "seq_id": 1, "session_id": "s", "model_seq_id": 1},
        {"model_id": "m", "seq_id": 0},
    ],
)
async def test_a_load_has_one_place(scene: Scene, place: dict[str, Any]) -> None:
    answer = await scene.post("load_weights", {"path": PATH, "optimizer": True, **place})
    assert answer.status_code == 422
