"""forward, forward_backward and optim_step over the wire: order, idempotency, compression, both encodings."""

from __future__ import annotations

import asyncio

import numpy as np
import pyarrow as pa
import pytest

from services.gateway.tinker import wire_pb2 as wire
from shared.operations.content import INLINE_BYTES
from tests.unit.gateway.tinker.kit import PROTOBUF, TAKES_PROTOBUF, Scene, datum, proto, sampled, train

ADAM = {"adam_params": {"learning_rate": 1e-3}, "type": "optim_step"}


def packed(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


async def test_a_json_client_trains(scene: Scene) -> None:
    found = await scene.result("forward_backward", train(scene.model_id, 1, [datum([1, 2, 3]), datum([4])]))
    assert found == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {"logprobs": {"data": [-0.5] * 3, "dtype": "float32", "shape": [3]}},
            {"logprobs": {"data": [-0.5], "dtype": "float32", "shape": [1]}},
        ],
        "metrics": {"loss:sum": 2.0},
    }
    stepped = await scene.result("optim_step", {"model_id": scene.model_id, "seq_id": 2, **ADAM})
    assert stepped == {"metrics": {"grad_norm:mean": 1.0}}
    adam = await scene.kit.operations.payload(scene.kit.operations.submits[-1])
    assert (adam.learning_rate, adam.beta2, adam.eps) == (1e-3, 0.95, 1e-12)


async def test_a_json_forward_has_its_own_field(scene: Scene) -> None:
    content = train(scene.model_id, 1, [datum([1])])["forward_backward_input"]
    body = {"forward_input": content, "model_id": scene.model_id, "seq_id": 1}
    assert (await scene.result("forward", body))["metrics"] == {"loss:sum": 0.5}
    assert scene.kit.operations.submits[-1].kind == "forward"


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("forward_only", "kind"), [(False, "forward_backward"), (True, "forward")])
async def test_a_protobuf_client_trains(scene: Scene, compressed: bool, forward_only: bool, kind: str) -> None:
    body = proto(train(scene.model_id, 1, [datum([1, 2, 3]), datum([4])]), forward_only).SerializeToString()
    headers = dict(PROTOBUF)
    if compressed:
        body, headers = packed(body), headers | {"content-encoding": "zstd"}
    answer = await scene.post("forward_backward", body, headers)
    result = await scene.retrieve(answer, TAKES_PROTOBUF)
    assert result.headers["content-type"] == "application/x-protobuf"
    output = wire.ForwardBackwardOutput.FromString(result.content)
    assert dict(output.metrics) == {"loss:sum": 2.0}
    (record,) = output.loss_fn_outputs
    logprobs = record.fields["logprobs"]
    assert record.num_datums == 2
    assert np.frombuffer(logprobs.data, np.float32).tolist() == [-0.5] * 4
    assert np.frombuffer(logprobs.offsets, np.int64).tolist() == [0, 12, 16]
    assert scene.kit.operations.submits[-1].kind == kind


async def test_both_encodings_of_one_request_are_one_operation(scene: Scene) -> None:
    request = train(scene.model_id, 1, [sampled([1, 2, 3])], "ppo", clip_low_threshold=0.75)
    by_json = await scene.post("forward_backward", request)
    by_proto = await scene.post("forward_backward", proto(request).SerializeToString(), PROTOBUF)
    assert by_json.json() == by_proto.json()
    other = await scene.post("forward_backward", train(scene.model_id, 1, [datum([9])]))
    assert other.status_code == 409
    assert len(scene.kit.operations.submits) == 1


async def test_chunks_are_worked_on_in_the_order_of_their_numbers(scene: Scene) -> None:
    answers = {
        seq: await scene.post("forward_backward", train(scene.model_id, seq, [datum([seq])])) for seq in (2, 3, 1, 4)
    }
    assert scene.kit.operations.order == [1, 2, 3, 4]
    for answer in answers.values():
        assert (await scene.retrieve(answer)).json()["metrics"] == {"loss:sum": 0.5}


async def test_an_optim_step_may_come_before_the_result_is_asked_for(scene: Scene) -> None:
    step = await scene.post("optim_step", {"model_id": scene.model_id, "seq_id": 2, **ADAM})
    waits = await scene.retrieve(step)
    assert waits.json() == {
        "type": "try_again",
        "request_id": step.json()["request_id"],
        "queue_state": "active",
    }
    await scene.post("forward_backward", train(scene.model_id, 1, [datum([1])]))
    assert (await scene.retrieve(step)).json() == {"metrics": {"grad_norm:mean": 1.0}}


async def test_large_payloads_are_in_the_store_before_the_row_names_them(scene: Scene) -> None:
    tokens = list(range(1, INLINE_BYTES // 8))
    await scene.result("forward_backward", train(scene.model_id, 1, [datum(tokens)]))
    large = scene.kit.operations.submits[-1].payload
    assert large.inline is None
    assert large.file is not None
    assert (await scene.kit.operations.payload(scene.kit.operations.submits[-1])).rows[0].tokens.tolist() == tokens
    await scene.result("forward_backward", train(scene.model_id, 2, [datum([1])]))
    assert scene.kit.operations.submits[-1].payload.file is None


@pytest.mark.parametrize("seq_id", [0, -1, 2**31, "1", 1.5, None, True])
async def test_a_number_that_is_none_is_refused(scene: Scene, seq_id: object) -> None:
    answer = await scene.post("forward_backward", train(scene.model_id, 1, [datum([1])]) | {"seq_id": seq_id})
    step = await scene.post("optim_step", {"model_id": scene.model_id, "seq_id": seq_id, **ADAM})
    assert (answer.status_code, step.status_code) == (422, 422)
    assert "seq_id" in answer.json()["error"]
    await scene.next_is_served(1)


@pytest.mark.parametrize("seq_id", [0, -1])
async def test_the_same_in_protobuf(scene: Scene, seq_id: int) -> None:
    body = proto(train(scene.model_id, seq_id, [datum([1])])).SerializeToString()
    answer = await scene.post("forward_backward", body, PROTOBUF)
    assert answer.status_code == 422
    await scene.next_is_served(1)


async def test_another_tenants_model_is_unknown(scene: Scene) -> None:
    async with scene.kit.http("key-beta") as http:
        stranger = Scene(scene.kit, http, scene.session_id, scene.model_id)
        answer = await stranger.post("forward_backward", train(scene.model_id, 1, [datum([1])]))
    assert answer.status_code == 404
    await scene.next_is_served(1)


async def test_content_that_is_not_allowed_fails_as_the_users_and_uses_its_number(scene: Scene) -> None:
    for seq, request in enumerate(
        (
            train(scene.model_id, 1, [datum([1])], "stable_reinforce"),
            train(scene.model_id, 2, [datum([1], [1, 2])]),
            train(scene.model_id, 3, []),
        ),
        start=1,
    ):
        failed = await scene.result("forward_backward", request)
        assert failed.keys() == {"error", "category"}
        assert failed["category"] == "user"
        sent = proto(request).SerializeToString()
        assert (await scene.post("forward_backward", sent, PROTOBUF)).status_code == 409, seq
    await scene.next_is_served(4)


async def test_two_gateways_over_one_catalog_are_one(scene: Scene) -> None:
    request = train(scene.model_id, 1, [datum([1])])
    answers = await asyncio.gather(*(scene.post("forward_backward", request) for _ in range(4)))
    assert len({answer.json()["request_id"] for answer in answers}) == 1
