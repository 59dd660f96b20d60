"""The mint extensions: reverse KL as an operation of its model, interpolation as a new checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mint_schemas.training import Lora
from safetensors.numpy import load

from services.gateway.tinker.extensions import reverse_kl_json
from services.gateway.tinker.rest import interpolation
from services.gateway.tinker.rest.interpolation import interpolation_json
from shared.adapters.layout import TENSOR_FILE
from shared.operations.payload import ReverseKlPayload, ReverseKlResult, SavedResult, decode
from tests.unit.gateway.tinker_rest.kit import LORA, RUN, World

KL = "/api/v1/mint/forward_backward_reverse_kl"
MIX = "/api/v1/mint/checkpoints/interpolate"
TEACHER = "tinker://s1:train:9/sampler_weights/teacher"


def _input(*tokens: int) -> dict[str, Any]:
    return {"chunks": [{"tokens": list(tokens), "type": "encoded_text"}]}


def _datum(**changes: Any) -> dict[str, Any]:
    """As `mint`'s client writes one, nulls included."""
    return {
        "student_input": _input(1, 2, 3),
        "reference_input": _input(7, 8, 1, 2, 3),
        "target_tokens": {"data": [2, 3, 4], "shape": None, "dtype": "int64"},
        "weights": {"data": [0.0, 1.0, 0.5], "shape": [3], "dtype": "float32"},
        **changes,
    }


def _ask(**changes: Any) -> dict[str, Any]:
    return {
        "model_id": RUN,
        "reference_model_path": TEACHER,
        "data": [_datum()],
        "temperature": 2.0,
        "seq_id": 5,
        "type": "mint_forward_backward_reverse_kl",
        **changes,
    }


async def test_a_reverse_kl_is_stored_as_an_operation_of_its_model(world: World) -> None:
    world.operations.add_model()
    async with world.http() as http:
        answer = await http.post(KL, json=_ask())
    assert answer.json() == {"request_id": "op-1", "model_id": RUN}
    (request,) = world.operations.submitted
    assert (request.model_id, request.seq_id, request.kind, request.key) == (RUN, 5, "reverse_kl", "")
    assert (request.tenant, request.failure) == ("acme", None)
    payload = decode(request.payload.inline or b"")
    assert isinstance(payload, ReverseKlPayload)
    assert (payload.reference, payload.temperature) == (TEACHER, 2.0)
    (row,) = payload.rows
    assert row.student_input.tolist() == [1, 2, 3]
    assert row.reference_input.tolist() == [7, 8, 1, 2, 3]
    assert (row.target_tokens.tolist(), row.target_tokens.dtype) == ([2, 3, 4], np.int64)
    assert (row.weights.tolist(), row.weights.dtype) == ([0.0, 1.0, 0.5], np.float32)


async def test_without_a_number_it_stands_beside_those_that_the_client_counts(world: World) -> None:
    world.operations.add_model()
    async with world.http() as http:
        headers = {"x-idempotency-key": "stainless-1"}
        answer = await http.post(KL, json=_ask(seq_id=None), headers=headers)
    assert answer.status_code == 200
    (request,) = world.operations.submitted
    assert (request.seq_id, request.key) == (0, "stainless-1")


async def test_targets_in_the_clients_default_dtype_are_whole_numbers(world: World) -> None:
    world.operations.add_model()
    floats = {"data": [2.0, 3.0, 4.0], "shape": None, "dtype": "float32"}
    async with world.http() as http:
        await http.post(KL, json=_ask(data=[_datum(target_tokens=floats)]))
        await http.post(KL, json=_ask(data=[_datum()]))
    assert world.operations.submitted[0].digest == world.operations.submitted[1].digest


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": []}, "at least one"),
        ({"data": [_datum(weights={"data": [1.0], "dtype": "float32"})]}, "data[0].weights"),
        ({"data": [_datum(weights={"data": 1.0, "dtype": "float32"})]}, "data[0].weights"),
        ({"data": [_datum(target_tokens={"data": [2.5, 3, 4], "dtype": "float32"})]}, "whole numbers"),
        ({"data": [_datum(target_tokens={"data": [2, 3, -4], "dtype": "int64"})]}, "-4"),
        ({"data": [_datum(), _datum(student_input=_input())]}, "data[1].student_input"),
        ({"data": [_datum(reference_input={"chunks": [{"type": "image", "data": ""}]})]}, "image"),
        ({"reference_model_path": "tinker://r/weights/.."}, ".."),
        ({"reference_model_path": "mint://teacher-step-0010"}, "tinker://"),
    ],
)
async def test_content_that_is_not_allowed_uses_its_number_and_fails_in_words(
    world: World, changes: dict[str, Any], said: str
) -> None:
    world.operations.add_model()
    async with world.http() as http:
        numbered = await http.post(KL, json=_ask(**changes))
        unnumbered = await http.post(KL, json=_ask(seq_id=None, **changes))
    assert numbered.status_code == 200
    (request,) = world.operations.submitted
    assert request.failure is not None
    assert request.failure.category == "user"
    assert said in request.failure.message
    assert unnumbered.status_code in (400, 422)
    assert said in unnumbered.json()["detail"]


@pytest.mark.parametrize(
    "changes", [{"temperature": 0}, {"temperature": "hot"}, {"seq_id": 0}, {"seq_id": 2**40}, {"rank": 3}, {"data": 1}]
)
async def test_what_is_no_such_request_is_refused_and_uses_no_number(world: World, changes: dict[str, Any]) -> None:
    world.operations.add_model()
    async with world.http() as http:
        answer = await http.post(KL, json=_ask(**changes))
    assert answer.status_code == 422
    assert world.operations.submitted == []


async def test_another_tenants_model_does_not_exist(world: World) -> None:
    world.operations.add_model()
    async with world.http("key-beta") as http:
        answer = await http.post(KL, json=_ask())
    assert answer.status_code == 404


def test_the_answer_of_a_reverse_kl_has_a_tensor_for_each_datum() -> None:
    answer = reverse_kl_json(ReverseKlResult((0.5, 0.25), {"loss:sum": 0.75}))
    assert answer == {
        "outputs": [
            {"loss": {"data": [0.5], "dtype": "float32", "shape": [1]}},
            {"loss": {"data": [0.25], "dtype": "float32", "shape": [1]}},
        ],
        "metrics": {"loss:sum": 0.75},
        "type": "mint_forward_backward_reverse_kl",
    }


async def _mix(world: World, key: str = "key-acme", **body: Any) -> Any:
    asked = {"output_path": None, "output_checkpoint_type": "sampler", "type": "mint_interpolate_checkpoints", **body}
    async with world.http(key) as http:
        return await http.post(MIX, json=asked)


def _delta(tensors: dict[str, Any], scaling: float) -> dict[str, Any]:
    seconds = [name for name in tensors if name.endswith(".lora_B.weight")]
    return {
        name: scaling * tensors[name].astype(np.float64) @ tensors[name.replace("lora_B", "lora_A")] for name in seconds
    }


async def test_a_combination_is_a_new_checkpoint_of_the_tenant(world: World) -> None:
    first, second = await world.sampler_path("a", seed=1), await world.training_path("b", seed=2)
    answer = await _mix(world, source_paths=[first.path, second.path], coefficients=[0.75, 0.25], output_path="mixed")
    assert answer.json() == {"request_id": "import-mixed", "model_id": None}
    (request,) = world.operations.imported
    assert (request.tenant, request.name, request.kind) == ("acme", "mixed", "interpolate")
    assert (request.manifest.rank, request.manifest.alpha) == (2, 32.0)
    made = load(await world.store.get(request.files[TENSOR_FILE]))
    wanted = {
        name: 0.75 * one + 0.25 * other
        for (name, one), other in zip(
            _delta(world.tensors(1), 16.0).items(), _delta(world.tensors(2), 16.0).values(), strict=True
        )
    }
    for name, delta in _delta(made, 16.0).items():
        u, s, vt = np.linalg.svd(wanted[name])
        nearest = (u[:, :2] * s[:2]) @ vt[:2]
        assert np.allclose(delta, nearest, atol=1e-5)


async def test_the_answer_of_a_combination_repeats_what_was_asked(world: World) -> None:
    first, second = await world.sampler_path("a", seed=1), await world.sampler_path("b", seed=2)
    paths = [first.path, second.path]
    await _mix(world, source_paths=paths, coefficients=[0.5, 0.5])
    operation = await world.operations.import_path(world.operations.imported[0])
    assert operation.result is not None
    result = decode(operation.result.inline or b"")
    assert isinstance(result, SavedResult)
    answer = interpolation_json(result)
    assert 0 < answer.pop("relative_error") < 1
    assert answer == {
        "path": result.path,
        "checkpoint_type": "sampler",
        "source_paths": paths,
        "coefficients": [0.5, 0.5],
        "has_rank_shards": False,
        "type": "mint_interpolate_checkpoints",
    }


async def test_one_source_with_coefficient_one_comes_out_to_the_byte(world: World) -> None:
    first, second = await world.sampler_path("a", seed=1), await world.sampler_path("b", seed=2)
    await _mix(world, source_paths=[first.path, second.path], coefficients=[1.0, 0.0], output_path="x")
    await _mix(world, source_paths=[first.path, first.path], coefficients=[0.25, 0.75], output_path="y")
    made = {request.manifest.adapter_sha256 for request in world.operations.imported}
    assert made == {world.revisions.manifests[first.revision or ""].adapter_sha256}


async def test_the_same_request_again_finds_what_it_made_and_another_does_not_take_its_name(world: World) -> None:
    first, second = await world.sampler_path("a", seed=1), await world.sampler_path("b", seed=2)
    paths = [first.path, second.path]
    one = await _mix(world, source_paths=paths, coefficients=[0.5, 0.5])
    same = await _mix(world, source_paths=paths, coefficients=[0.5, 0.5])
    other = await _mix(world, source_paths=paths, coefficients=[0.4, 0.6])
    assert one.json() == same.json() != other.json()
    assert len(world.operations.imported) == 2
    name = world.operations.imported[0].name
    taken = await _mix(world, source_paths=paths, coefficients=[0.1, 0.9], output_path=name)
    assert taken.status_code == 409


async def test_sources_must_be_readable_and_of_one_shape(world: World) -> None:
    first = await world.sampler_path("a")
    larger = await world.sampler_path("b", lora=Lora(rank=4, alpha=32.0, target_modules=("q_proj", "down_proj")))
    unlike = await _mix(world, source_paths=[first.path, larger.path], coefficients=[0.5, 0.5])
    foreign = await _mix(world, "key-beta", source_paths=[first.path], coefficients=[1.0])
    assert unlike.status_code == 422
    assert "rank" in unlike.json()["detail"]
    assert foreign.status_code == 404
    assert world.operations.imported == []


async def test_sources_of_too_many_ranks_together_are_refused_before_they_are_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpolation, "MAX_RANKS", 2 * LORA.rank)
    paths = [(await world.sampler_path(name)).path for name in ("a", "b", "c")]
    assert (await _mix(world, source_paths=paths[:2], coefficients=[0.5, 0.5])).status_code == 200
    answer = await _mix(world, source_paths=paths, coefficients=[0.5, 0.25, 0.25])
    assert answer.status_code == 422
    assert "combine some of them first" in answer.json()["detail"]


@pytest.mark.parametrize(
    "body",
    [
        {"source_paths": [], "coefficients": []},
        {"source_paths": ["PATH"], "coefficients": [0.5, 0.5]},
        {"source_paths": ["PATH"], "coefficients": ["x"]},
        {"source_paths": ["PATH"], "coefficients": [1e300]},
        {"source_paths": ["PATH"], "coefficients": [0.5], "output_path": "tinker://r/sampler_weights/x"},
        {"source_paths": ["PATH"], "coefficients": [0.5], "output_path": ".."},
        {"source_paths": ["tinker://r/weights/../x"], "coefficients": [0.5]},
        {"source_paths": ["PATH"], "coefficients": [0.5], "output_checkpoint_type": "training"},
    ],
)
async def test_a_combination_outside_the_bounds_is_a_clear_error(world: World, body: dict[str, Any]) -> None:
    path = (await world.sampler_path("a")).path
    answer = await _mix(world, **body | {"source_paths": [path if p == "PATH" else p for p in body["source_paths"]]})
    assert answer.status_code in (400, 422)
    assert answer.json()["category"] == "user"
    assert world.operations.imported == []
