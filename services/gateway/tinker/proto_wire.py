"""The protobuf of `forward_backward` and of results (`wire.proto`): packed arrays, little-endian.

In: a body's bytes, or a result. Out: what was asked, or bytes. Invariants as in `json_wire.py`: data are counted by
walking over them before anything is parsed, and one content is one payload.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from services.gateway.tinker import wire_pb2 as wire
from services.gateway.tinker.errors import invalid, unsupported
from services.gateway.tinker.json_wire import PARTS_PER_DATUM, too_many
from services.gateway.tinker.rows import RawDatum, train_payload
from services.gateway.tinker.tensors import MAX_DIMENSIONS, NUMPY, Csr, Dtype, RawTensor
from shared.operations.payload import Array, SampleResult, Sequence, TrainPayload, TrainResult

__all__ = ["PROTOBUF", "AskedProto", "asked_proto", "sample_proto", "train_proto"]

PROTOBUF = "application/x-protobuf"
EMPTY_LOGPROB = -99999.0
"""Of a top-k cell that holds no token."""

_DATA_FIELD = 3
_VARINT, _FIXED64, _BYTES, _FIXED32, _GROUPS = 0, 1, 2, 5, (3, 4)
_INT32, _UINT16 = np.dtype("<i4"), np.dtype("<u2")
_PACKED: dict[int, tuple[Dtype, np.dtype[Any]]] = {
    wire.DTYPE_FLOAT32: ("float32", NUMPY["float32"]),
    wire.DTYPE_INT64: ("int64", NUMPY["int64"]),
    wire.DTYPE_INT32: ("int64", _INT32),
    wire.DTYPE_BFLOAT16: ("float32", _UINT16),
}


@dataclass(frozen=True)
class AskedProto:
    """Like `json_wire.Asked`."""

    message: wire.ForwardBackwardRequest
    forward_only: bool

    @property
    def model_id(self) -> Any:
        return self.message.model_id

    @property
    def seq_id(self) -> Any:
        return self.message.seq_id

    def payload(self, max_elements: int) -> TrainPayload:
        return train_payload(_data(self.message), self.message.loss_fn, _config(self.message), max_elements)


def asked_proto(body: bytes, forward_only: bool, max_data: int) -> AskedProto:
    """Raises Refused for what is no such message."""
    if not _within(body, max_data):
        raise too_many(max_data)
    message = wire.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise invalid(f"the body is not the protobuf of a ForwardBackwardRequest: {error}") from error
    return AskedProto(message, forward_only or message.forward_only)


def train_proto(result: TrainResult) -> bytes:
    """Rows of one width are one record; there are several where widths differ."""
    output = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(result.metrics))
    for width, group in groupby(result.logprobs, key=lambda array: array.shape[1:]):
        arrays = [np.ascontiguousarray(array, NUMPY["float32"]) for array in group]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=NUMPY["int64"])
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        batched = record.fields["logprobs"]
        batched.data = b"".join(array.tobytes() for array in arrays)
        batched.offsets = offsets.tobytes()
        batched.dtype = wire.DTYPE_FLOAT32
        batched.trailing_shape.extend(width)
    return output.SerializeToString()


def sample_proto(result: SampleResult) -> bytes:
    response = wire.SampleResponse(sequences=[_sequence(sequence) for sequence in result.sequences])
    if result.prompt_logprobs is not None:
        response.prompt_logprobs = result.prompt_logprobs.astype(NUMPY["float32"]).tobytes()
    if result.topk is not None:
        # A width of 0 would say that nothing was asked for.
        width = max([1, *(len(top) for top in result.topk)])
        ids = np.zeros((len(result.topk), width), _INT32)
        logprobs = np.full((len(result.topk), width), EMPTY_LOGPROB, NUMPY["float32"])
        for position, top in enumerate(result.topk):
            for rank, (token, logprob) in enumerate(top):
                ids[position, rank], logprobs[position, rank] = token, logprob
        response.topk_prompt_logprobs.CopyFrom(
            wire.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=width, length=len(result.topk))
        )
    return response.SerializeToString()


def _sequence(sequence: Sequence) -> wire.SampledSequence:
    return wire.SampledSequence(
        stop_reason=wire.STOP_REASON_STOP if sequence.stop_reason == "stop" else wire.STOP_REASON_LENGTH,
        tokens=sequence.tokens.astype(_INT32).tobytes(),
        logprobs=sequence.logprobs.astype(NUMPY["float32"]).tobytes(),
    )


def _data(message: wire.ForwardBackwardRequest) -> Iterator[RawDatum]:
    for index, datum in enumerate(message.data):
        where = f"data[{index}]"
        parts = [_chunk(chunk, f"{where}.model_input.chunks[{at}]") for at, chunk in enumerate(datum.model_input)]
        yield RawDatum(
            np.concatenate(parts) if parts else np.empty(0, NUMPY["int64"]),
            {
                name: _tensor(tensor, f"{where}.loss_fn_inputs.{name[:40]}")
                for name, tensor in datum.loss_fn_inputs.items()
            },
        )


def _chunk(chunk: wire.Chunk, where: str) -> Array:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise unsupported(f"{where}: a chunk of type {kind or 'nothing'!r}", "send encoded_text")
    return _array(chunk.encoded_text.tokens, _INT32, where).astype(NUMPY["int64"])


def _tensor(tensor: wire.Tensor, where: str) -> RawTensor:
    if tensor.dtype not in _PACKED:
        raise invalid(f"{where}: dtype {tensor.dtype} is not allowed; int64, int32, float32 and bfloat16 are")
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise invalid(f"{where}: a shape of {len(tensor.shape)} dimensions is not allowed; one or two dimensions are")
    dtype, packed = _PACKED[tensor.dtype]
    kind = tensor.WhichOneof("encoding")
    if kind is None:
        raise invalid(f"{where}: the tensor has neither dense nor sparse_csr")
    sparse = tensor.sparse_csr if kind == "sparse_csr" else None
    values = _array(sparse.values if sparse is not None else tensor.dense, packed, where)
    return RawTensor(
        dtype=dtype,
        values=_widened(values, dtype),
        shape=tuple(tensor.shape) or None,
        csr=None
        if sparse is None
        else Csr(_array(sparse.crow_indices, NUMPY["int64"], where), _array(sparse.col_indices, NUMPY["int64"], where)),
    )


def _array(data: bytes, dtype: np.dtype[Any], where: str) -> Array:
    if len(data) % dtype.itemsize:
        raise invalid(f"{where}: {len(data)} bytes are no whole number of values of {dtype.itemsize} bytes")
    return np.frombuffer(data, dtype)


def _widened(values: Array, dtype: Dtype) -> Array:
    """bfloat16 is the upper half of a float32."""
    if values.dtype == _UINT16:
        return (values.astype(np.uint32) << 16).view(NUMPY["float32"])
    return values.astype(NUMPY[dtype], copy=False)


def _config(message: wire.ForwardBackwardRequest) -> dict[str, Any]:
    if message.loss_fn_config_v2:
        return {
            key: value.text if value.WhichOneof("value") == "text" else value.number
            for key, value in message.loss_fn_config_v2.items()
        }
    return dict(message.loss_fn_config)


def _within(body: bytes, max_data: int) -> bool:
    """Whether the data and their parts are no more than allowed. What is no protobuf is left to the parser."""
    most, found, parts = max_data * PARTS_PER_DATUM, 0, 0
    for number, start, end in _fields(body, 0, len(body)):
        if number == _DATA_FIELD:
            found += 1
            for _ in _fields(body, start, end):
                parts += 1
                if parts > most:
                    return False
        else:
            parts += 1
        if found > max_data or parts > most:
            return False
    return True


def _fields(body: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, begin and end of each field up to the first that no parser can read. Raises Refused for groups, which
    parsers do read and no client sends: what stands behind one is counted too, or not taken at all."""
    while at < end:
        tag, at = _varint(body, at, end)
        kind, start = tag & 7, at
        if kind == _BYTES:
            size, start = _varint(body, at, end)
            at = start + size
        elif kind == _VARINT:
            _, at = _varint(body, at, end)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        elif kind in _GROUPS:
            raise invalid("the body is not the protobuf of a ForwardBackwardRequest: it holds a group")
        else:
            return
        if at > end:
            return
        yield tag >> 3, start, at


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """The number, and where what follows begins; past the end where it is cut."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return 0, end + 1
