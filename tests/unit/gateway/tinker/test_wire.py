"""Data in both encodings: one content is one payload; what does not fit together is refused by its place."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest

from services.gateway.tinker import json_wire, proto_wire
from services.gateway.tinker import wire_pb2 as wire
from shared.errors import Refused
from shared.operations.payload import TrainPayload, digest, encode
from tests.unit.gateway.tinker.kit import datum, proto, sampled, tensor, train

MOST = 1 << 20


def by_json(request: dict[str, Any]) -> TrainPayload:
    return json_wire.asked(json.dumps(request).encode(), False, 100).payload(MOST)


def by_proto(request: dict[str, Any] | wire.ForwardBackwardRequest) -> TrainPayload:
    message = request if isinstance(request, wire.ForwardBackwardRequest) else proto(request)
    return proto_wire.asked_proto(message.SerializeToString(), False, 100).payload(MOST)


SPARSE = {
    "data": [7, 9, 5],
    "dtype": "int64",
    "shape": [3, 2],
    "sparse_crow_indices": [0, 1, 1, 3],
    "sparse_col_indices": [1, 0, 1],
}
WIDE = datum([1, 2, 3])
WIDE["loss_fn_inputs"] = {
    "target_tokens": SPARSE,
    "weights": SPARSE | {"data": [0.5, -1.0, 0.25], "dtype": "float32"},
}
CONTENTS = [
    train("m", 1, [datum([1, 2, 3]), datum([4])]),
    train("m", 1, [datum([1, 2, 3], [2, 3, 4], weights=tensor([0.1, 0.0, -2.5]))]),
    train("m", 1, [sampled([5, 6])], "importance_sampling"),
    train("m", 1, [sampled([5, 6])], "ppo", clip_low_threshold=0.9, clip_high_threshold=1.1),
    train("m", 1, [sampled([5, 6])], "cispo"),
    train("m", 1, [sampled([5, 6])], "dro", beta=0.1),
    train("m", 1, [sampled([5, 6])], "gspo"),
    train("m", 1, [WIDE]),
]


@pytest.mark.parametrize("request_", CONTENTS, ids=lambda r: r["forward_backward_input"]["loss_fn"])
def test_json_and_protobuf_of_one_content_have_one_digest(request_: dict[str, Any]) -> None:
    assert digest(encode(by_json(request_))) == digest(encode(by_proto(request_)))


def test_a_sparse_tensor_unfolds_row_by_row() -> None:
    row = by_json(train("m", 1, [WIDE])).rows[0]
    assert row.inputs["target_tokens"].tolist() == [[0, 7], [0, 0], [9, 5]]
    assert row.inputs["weights"].tolist() == [[0.0, 0.5], [0.0, 0.0], [-1.0, 0.25]]


def test_chunks_of_text_are_one_prompt() -> None:
    found = datum([1, 2, 3, 4])
    found["model_input"]["chunks"] = [{"tokens": [1]}, {"type": "encoded_text", "tokens": [2, 3]}, {"tokens": [4]}]
    request = train("m", 1, [found])
    assert by_json(request).rows[0].tokens.tolist() == by_proto(request).rows[0].tokens.tolist() == [1, 2, 3, 4]


def test_inputs_behind_the_last_target_are_dropped() -> None:
    row = by_json(train("m", 1, [datum([1, 2, 3, 4], [2, 3])])).rows[0]
    assert row.tokens.tolist() == [1, 2]
    assert row.inputs["target_tokens"].tolist() == [2, 3]


def test_cross_entropy_without_weights_weighs_every_token_one() -> None:
    bare, whole = datum([1, 2]), datum([1, 2])
    del bare["loss_fn_inputs"]["weights"]
    assert digest(encode(by_json(train("m", 1, [bare])))) == digest(encode(by_json(train("m", 1, [whole]))))


def test_packed_int32_and_bfloat16_widen() -> None:
    message = proto(train("m", 1, [datum([1, 2], weights=tensor([1.5, -2.0]))]))
    inputs = message.data[0].loss_fn_inputs
    inputs["target_tokens"].dtype = wire.DTYPE_INT32
    inputs["target_tokens"].dense = np.array([3, 4], np.int32).tobytes()
    inputs["weights"].dtype = wire.DTYPE_BFLOAT16
    inputs["weights"].dense = (np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    row = by_proto(message).rows[0]
    assert row.inputs["target_tokens"].tolist() == [3, 4]
    assert row.inputs["weights"].tolist() == [1.5, -2.0]


def test_the_newer_config_takes_the_place_of_the_older() -> None:
    message = proto(train("m", 1, [sampled([1])], "dro", beta=0.5))
    message.loss_fn_config_v2["beta"].number = 0.25
    assert by_proto(message).config == {"beta": 0.25}
    message.loss_fn_config_v2["beta"].text = "much"
    with pytest.raises(Refused, match="beta"):
        by_proto(message)


ONES = tensor([1.0] * 3)


def wrong(**inputs: Any) -> dict[str, Any]:
    found = datum([1, 2, 3])
    found["loss_fn_inputs"] |= inputs
    return train("m", 1, [found])


def chunk(**found: Any) -> dict[str, Any]:
    one = datum([1, 2, 3])
    one["model_input"]["chunks"] = [found]
    return train("m", 1, [one])


REFUSED = {
    "dtype of targets": (wrong(target_tokens=tensor([1.0, 2.0, 3.0])), "target_tokens: its dtype is float32"),
    "dtype of weights": (wrong(weights=tensor([1, 2, 3], "int64")), "weights: its dtype is int64"),
    "shape is not the data's": (wrong(weights=tensor([1.0]) | {"shape": [3]}), "needs 3 values, 1 came"),
    "shape is negative": (wrong(weights=tensor([1.0] * 3) | {"shape": [-3]}), "shape"),
    "three dimensions": (wrong(weights=tensor([1.0] * 3) | {"shape": [3, 1, 1]}), "dimensions"),
    "weights too short": (wrong(weights=tensor([1.0])), "must be equal"),
    "targets longer than inputs": (train("m", 1, [datum([1, 2], [1, 2, 3])]), "3 targets are more than 2 input"),
    "NaN": (wrong(weights=tensor([1.0, float("nan"), 1.0])), "finite"),
    "infinity": (wrong(weights=tensor([1.0, float("inf"), 1.0])), "finite"),
    "beyond float32": (wrong(weights=tensor([1.0, 1e39, 1.0])), "finite"),
    "negative token": (train("m", 1, [datum([1, -2, 3])]), "-2 is no token id"),
    "no token": (train("m", 1, [datum([], [])]), "there is no token"),
    "no target": (train("m", 1, [datum([1, 2], [])]), "target_tokens is empty"),
    "no data": (train("m", 1, []), "send at least one datum"),
    "unknown loss": (train("m", 1, [datum([1])], "stable_reinforce"), "stable_reinforce"),
    "unknown input": (wrong(mask=tensor([1.0] * 3)), "has no input 'mask'"),
    "missing input": (train("m", 1, [datum([1])], "ppo"), "weights|needs advantages, logprobs"),
    "unknown setting": (train("m", 1, [datum([1])], "cross_entropy", beta=1.0), "has no setting 'beta'"),
    "missing setting": (train("m", 1, [sampled([1])], "dro"), "needs beta"),
    "thresholds crossed": (
        train("m", 1, [sampled([1])], "ppo", clip_low_threshold=2.0, clip_high_threshold=1.0),
        "above",
    ),
    "two targets a position": (
        train("m", 1, [datum([1, 2, 3], target_tokens=SPARSE, logprobs=ONES, advantages=ONES)], "ppo"),
        "one target a position",
    ),
    "row pointers fall": (wrong(target_tokens=SPARSE | {"sparse_crow_indices": [0, 2, 1, 3]}), "row pointers"),
    "row pointers whose differences wrap around": (
        wrong(
            target_tokens=SPARSE
            | {"data": [], "shape": [4, 2], "sparse_col_indices": []}
            | {"sparse_crow_indices": [0, 2**62, -(2**63), -(2**62), 0]}
        ),
        "row pointers",
    ),
    "too few row pointers": (wrong(target_tokens=SPARSE | {"sparse_crow_indices": [0, 3]}), "row pointers"),
    "column outside": (wrong(target_tokens=SPARSE | {"sparse_col_indices": [1, 0, 2]}), "column indices"),
    "cell twice": (wrong(target_tokens=SPARSE | {"sparse_col_indices": [1, 0, 0]}), "given twice"),
    "unfolds beyond the bound": (wrong(target_tokens=SPARSE | {"shape": [1 << 40, 1 << 20]}), "numbers in all"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_both_encodings(name: str) -> None:
    request, words = REFUSED[name]
    with pytest.raises(Refused, match=words):
        by_json(request)
    if name != "beyond float32":
        with pytest.raises(Refused, match=words):
            by_proto(request)


JSON_ONLY = {
    "text among numbers": wrong(weights=tensor([1.0, "x", 2.0])),
    "a list among numbers": wrong(weights=tensor([1.0, [2.0], 2.0])),
    "null among numbers": wrong(weights=tensor([1.0, None, 2.0])),
    "halves of tokens": wrong(target_tokens=tensor([1.5, 2.0, 3.0], "int64")),
    "a token beyond 64 bits": train("m", 1, [datum([2**70])]),
    "an unknown dtype": wrong(weights=tensor([1.0] * 3, "float64")),
    "no dtype": wrong(weights={"data": [1.0] * 3}),
    "an unknown field of a tensor": wrong(weights=tensor([1.0] * 3, requires_grad=True)),
    "an image": chunk(type="image", data="AAAA", format="png"),
    "an image asset": chunk(type="image_asset_pointer", location="x", format="png"),
    "a chunk that is no object": train("m", 1, [datum([1]) | {"model_input": {"chunks": [1]}}]),
    "a datum that is no object": train("m", 1, [1]),
}


@pytest.mark.parametrize("name", JSON_ONLY)
def test_what_json_alone_can_get_wrong_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="data"):
        by_json(JSON_ONLY[name])


def test_an_image_in_protobuf_is_refused_by_name() -> None:
    message = proto(train("m", 1, [datum([1])]))
    message.data[0].model_input.add().image.data = b"png"
    with pytest.raises(Refused, match="'image' is not supported"):
        by_proto(message)


def test_bytes_that_are_no_whole_number_of_values_are_refused() -> None:
    message = proto(train("m", 1, [datum([1])]))
    message.data[0].loss_fn_inputs["weights"].dense = b"abc"
    with pytest.raises(Refused, match="3 bytes"):
        by_proto(message)


def test_data_are_counted_before_they_are_parsed() -> None:
    body = json.dumps(train("m", 1, [datum([1])] * 101)).encode()
    with pytest.raises(Refused, match="more than 100 data"):
        json_wire.asked(body + b"and no JSON behind it", False, 100)
    message = proto(train("m", 1, [datum([1])] * 101)).SerializeToString()
    with pytest.raises(Refused, match="more than 100 data"):
        proto_wire.asked_proto(message + b"\xff\xff", False, 100)


def test_one_long_text_among_many_takes_no_memory_of_its_size() -> None:
    found = wrong(weights=tensor(["x" * 4000, *["a"] * 4000]))
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match="a flat list of numbers"):
            by_json(found)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("before", [b"\xa3\x06\xa4\x06", b"\xa3\x06" * 2])
def test_nothing_hides_behind_a_group(before: bytes) -> None:
    """A group of an unknown number is no error to a parser."""
    message = proto(train("m", 1, [datum([1])] * 101)).SerializeToString()
    with pytest.raises(Refused, match="group"):
        proto_wire.asked_proto(before + message, False, 100)
    hidden = wire.Datum(model_input=[wire.Chunk()] * 6401).SerializeToString()
    inside = before + hidden
    with pytest.raises(Refused, match="group"):
        proto_wire.asked_proto(b"\x1a" + _length(len(inside)) + inside, False, 100)


def test_fields_beside_the_data_are_counted_too() -> None:
    with pytest.raises(Refused, match="more than 100 data"):
        proto_wire.asked_proto(b"\x30\x01" * 6401, False, 100)


def test_a_shape_of_very_many_dimensions_is_refused_by_their_number() -> None:
    message = proto(train("m", 1, [datum([1])]))
    message.data[0].loss_fn_inputs["weights"].shape.extend([1] * 1000)
    with pytest.raises(Refused, match="1001 dimensions"):
        by_proto(message)


def _length(size: int) -> bytes:
    """As protobuf writes it."""
    parts = []
    while size > 0x7F:
        parts.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*parts, size])


def test_one_datum_of_very_many_parts_is_too_much() -> None:
    message = wire.ForwardBackwardRequest(data=[wire.Datum(model_input=[wire.Chunk()] * 6401)])
    with pytest.raises(Refused, match="more than 100 data"):
        proto_wire.asked_proto(message.SerializeToString(), False, 100)
    with pytest.raises(Refused, match="more than 100 data"):
        json_wire.asked(b"[" + b"{}," * 6401 + b"{}]", False, 100)
