"""POST /mint/v1/adapters: what was made elsewhere and fits becomes a revision and a training checkpoint."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest

from shared.adapters import layout
from shared.adapters.layout import CONFIG_FILE, TENSOR_FILE
from shared.rl.checkpoint import ADAPTER_FILE, STATE_FILE, read_state
from shared.store import keys
from tests.unit.gateway.tinker_rest.kit import BASE, World, unpacked

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": "/models/theirs",
    "r": 2,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "down_proj"],
    "use_rslora": True,
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "init_lora_weights": True,
    "lora_dropout": 0.1,
}


async def _uploaded(world: World, data: bytes, tenant: str = "acme") -> dict[str, Any]:
    ref = await world.store.put(keys.data(tenant, hashlib.sha256(data).hexdigest()), data)
    return ref.model_dump(mode="json")


async def _body(world: World, tensors: bytes | None = None, tenant: str = "acme", **config: Any) -> dict[str, Any]:
    data = json.dumps(CONFIG | config).encode()
    return {
        "base": BASE,
        "name": "theirs",
        "config": await _uploaded(world, data, tenant),
        "tensors": await _uploaded(world, tensors or layout.tensor_file_bytes(world.tensors()), tenant),
    }


async def test_an_adapter_becomes_a_path_with_its_configs_settings(world: World) -> None:
    body = await _body(world)
    async with world.http() as http:
        answer = await http.post("/mint/v1/adapters", json=body)
        again = await http.post("/mint/v1/adapters", json=body)
    made = answer.json()
    assert answer.status_code == 201
    assert again.json() == made
    assert made["path"].startswith("tinker://")
    assert made["base"] == BASE
    assert made["lora"] == {"rank": 2, "alpha": 16.0, "use_rslora": True, "target_modules": ["down_proj", "q_proj"]}
    (request,) = world.operations.imported
    assert (request.tenant, request.name, request.base, request.session_id) == ("acme", "theirs", BASE, None)
    assert request.manifest.adapter_sha256 == made["adapter_sha256"]
    assert request.actor.startswith("key:")


async def test_both_layouts_are_stored_under_their_content_and_hold_the_same_values(world: World) -> None:
    async with world.http() as http:
        await http.post("/mint/v1/adapters", json=await _body(world))
    (request,) = world.operations.imported
    assert sorted(request.files) == sorted([CONFIG_FILE, TENSOR_FILE, ADAPTER_FILE, STATE_FILE])
    stored = {name: await world.store.get(ref) for name, ref in request.files.items()}
    assert all(ref.key == keys.blob(ref.sha256) for ref in request.files.values())
    assert {name: request.files[name] for name in (CONFIG_FILE, TENSOR_FILE)} == request.manifest.files
    assert stored[TENSOR_FILE] == layout.tensor_file_bytes(world.tensors())
    state = read_state(stored[STATE_FILE])
    assert (state.base, state.base_sha256, state.rank, state.alpha, state.use_rslora) == (BASE, "1" * 64, 2, 16, True)
    assert request.manifest.scaling == 16 / 2**0.5


async def test_an_imported_adapter_is_downloaded_as_it_came(world: World) -> None:
    async with world.http() as http:
        path = (await http.post("/mint/v1/adapters", json=await _body(world))).json()["path"]
        run, kind, name = path.removeprefix("tinker://").split("/")
        link = await http.get(f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive")
        files = unpacked((await http.get(link.headers["location"])).content)
    assert files[TENSOR_FILE] == layout.tensor_file_bytes(world.tensors())
    assert json.loads(files[CONFIG_FILE])["use_rslora"] is True


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"r": 64}, "rank 64"),
        ({"r": 3}, "shape"),
        ({"r": "2"}, "r is '2'"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": -1}, "alpha"),
        ({"lora_alpha": 10**400}, "adapter_config.json"),
        ({"use_rslora": 1}, "use_rslora"),
        ({"target_modules": ["q_proj"]}, "down_proj"),
        ({"target_modules": ["q_proj", "down_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": None}, "target_modules"),
    ],
)
async def test_what_an_engine_could_not_load_is_refused_by_name(
    world: World, config: dict[str, Any], said: str
) -> None:
    async with world.http() as http:
        answer = await http.post("/mint/v1/adapters", json=await _body(world, **config))
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert world.operations.imported == []


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (b"PK\x03\x04" + b"x" * 100, "pickle"),
        (b"\x80\x02}q\x00.", "pickle"),
        (b"tensors", "too short"),
        (b"\xff" * 100, "at most"),
    ],
)
async def test_a_pickle_or_a_broken_file_is_refused(world: World, tensors: bytes, said: str) -> None:
    async with world.http() as http:
        answer = await http.post("/mint/v1/adapters", json=await _body(world, tensors))
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


async def test_values_and_names_are_looked_at(world: World) -> None:
    infinite, foreign = world.tensors(), world.tensors()
    infinite[next(iter(infinite))][0, 0] = np.inf
    foreign["base_model.model.lm_head.lora_A.weight"] = np.zeros((2, 4), np.float32)
    async with world.http() as http:
        answers = [
            await http.post("/mint/v1/adapters", json=await _body(world, layout.tensor_file_bytes(tensors)))
            for tensors in (infinite, foreign)
        ]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert "finite" in answers[0].json()["error"]["message"]
    assert "lm_head" in answers[1].json()["error"]["message"]


async def test_only_the_tenants_own_uploads_are_read(world: World) -> None:
    theirs = await _body(world, tenant="beta")
    own = await _body(world)
    elsewhere = own | {"tensors": own["tensors"] | {"key": keys.blob(own["tensors"]["sha256"])}}
    missing = own | {"tensors": own["tensors"] | {"sha256": "a" * 64, "key": keys.data("acme", "a" * 64)}}
    longer = own | {"tensors": own["tensors"] | {"size": own["tensors"]["size"] + 1}}
    async with world.http() as http:
        answers = [await http.post("/mint/v1/adapters", json=body) for body in (theirs, elsewhere, missing, longer)]
        foreign = await http.post("/mint/v1/adapters", json=own | {"tenant": "beta"})
    assert [answer.status_code for answer in answers] == [400] * 4
    assert {answer.json()["error"]["code"] for answer in answers} == {"unknown_data"}
    assert foreign.status_code == 404
    assert world.operations.imported == []


async def test_an_adapter_of_another_base_by_its_name_is_refused(world: World) -> None:
    world.gateway.bases["other/base"] = world.base  # type: ignore[index]
    async with world.http() as http:
        answer = await http.post("/mint/v1/adapters", json=await _body(world, base_model_name_or_path="other/base"))
    assert answer.status_code == 400
    assert "made for other/base" in answer.json()["error"]["message"]


async def test_a_taken_name_an_unknown_base_and_a_bad_name_are_refused(world: World) -> None:
    body = await _body(world)
    other = await _body(world, layout.tensor_file_bytes(world.tensors(seed=1)))
    async with world.http() as http:
        assert (await http.post("/mint/v1/adapters", json=body)).status_code == 201
        taken = await http.post("/mint/v1/adapters", json=other)
        base = await http.post("/mint/v1/adapters", json=body | {"base": "nobody/base"})
        names = [await http.post("/mint/v1/adapters", json=body | {"name": n}) for n in ("..", "a/b", "", "x" * 200)]
    assert taken.status_code == 409
    assert base.status_code == 404
    assert BASE in base.json()["error"]["message"]
    assert [answer.status_code for answer in names[:3]] == [400] * 3
    assert names[3].status_code == 201


async def test_the_development_key_says_whose_it_is_or_means_its_own(world: World) -> None:
    body = await _body(world)
    async with world.http("tml-dev") as http:
        named = await http.post("/mint/v1/adapters", json=body | {"tenant": "acme"})
        own = await http.post("/mint/v1/adapters", json=body)
    assert named.status_code == 201
    assert own.status_code == 400
    assert "uploaded no such file" in own.json()["error"]["message"]
