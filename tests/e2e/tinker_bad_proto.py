"""Protobuf of forward_backward that cannot be, each with the words that its refusal must hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from services.gateway.tinker import wire_pb2
from tests.e2e.tinker_bad_data import MANY, WEIGHTS, Body, Case, Scene
from tests.e2e.tinker_wire import Proto, packed, proto_datum


def proto(*data: wire_pb2.Datum) -> Callable[[Scene], Body]:
    return lambda scene: Proto(scene.model, list(data)).body()


def sparse(*shape: int, crow: tuple[int, ...] = (0, 1), columns: tuple[int, ...] = (0,)) -> wire_pb2.Tensor:
    indices = {name: np.array(values, "<i8").tobytes() for name, values in (("crow", crow), ("col", columns))}
    csr = wire_pb2.SparseCsr(
        values=np.ones(len(columns), "<f4").tobytes(), crow_indices=indices["crow"], col_indices=indices["col"]
    )
    return wire_pb2.Tensor(sparse_csr=csr, dtype=wire_pb2.DTYPE_FLOAT32, shape=shape)


PROTO: dict[str, Case] = {
    "no protobuf": ("forward_backward", lambda scene: b"\xff" * 40, ("not the protobuf",)),
    "protobuf that is cut": (
        "forward_backward",
        lambda scene: Proto(scene.model, [proto_datum()]).body()[:-5],
        ("not the protobuf",),
    ),
    "JSON for protobuf": ("forward_backward", lambda scene: b'{"data": []}', ("not the protobuf",)),
    "an empty protobuf": ("forward_backward", lambda scene: b"", ("model_id", "seq_id")),
    "protobuf without data": ("forward_backward", proto(), ("data", "there is none")),
    "NaN in protobuf": (
        "forward_backward",
        proto(proto_datum(length=3, weights=packed([1.0, float("nan"), 1.0]))),
        ("data[0].loss_fn_inputs.weights", "finite"),
    ),
    "half a value": (
        "forward_backward",
        proto(proto_datum(length=3, weights=wire_pb2.Tensor(dense=b"12345", dtype=wire_pb2.DTYPE_FLOAT32))),
        ("data[0].loss_fn_inputs.weights", "5 bytes", "4 bytes"),
    ),
    "no dtype": (
        "forward_backward",
        proto(proto_datum(length=3, weights=wire_pb2.Tensor(dense=b"1234"))),
        ("data[0].loss_fn_inputs.weights", "dtype 0"),
    ),
    "a tensor of nothing": (
        "forward_backward",
        proto(proto_datum(length=3, weights=wire_pb2.Tensor(dtype=wire_pb2.DTYPE_FLOAT32))),
        ("data[0].loss_fn_inputs.weights", "neither dense nor sparse_csr"),
    ),
    "a shape below 0": (
        "forward_backward",
        proto(proto_datum(length=3, weights=packed(WEIGHTS, shape=[-3]))),
        ("data[0].loss_fn_inputs.weights", "[-3]"),
    ),
    "a sparse tensor of 2^62 cells": (
        "forward_backward",
        proto(proto_datum(length=3, weights=sparse(2**31, 2**31))),
        ("numbers in all",),
    ),
    "row pointers that fall": (
        "forward_backward",
        proto(proto_datum(length=3, weights=sparse(3, 1, crow=(0, 1, 0, 1)))),
        ("data[0].loss_fn_inputs.weights", "row pointers must rise"),
    ),
    "a column outside": (
        "forward_backward",
        proto(proto_datum(length=3, weights=sparse(3, 1, crow=(0, 1, 1, 1), columns=(4,)))),
        ("data[0].loss_fn_inputs.weights", "column indices must be from 0 to 0"),
    ),
    "10^6 data in protobuf": (
        "forward_backward",
        lambda scene: Proto(scene.model, [wire_pb2.Datum()] * MANY).body(),
        ("more than 4096 data",),
    ),
}
