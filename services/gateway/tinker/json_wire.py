"""The JSON of `forward`, `forward_backward` and results: the same values as protobuf carries.

In: a body's bytes, or a result. Out: what was asked (its content is decoded by `Asked.payload`, when its place in the
order is known already), or JSON's values. Invariant: a body that is too large or holds too many data is refused before
its numbers are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pydantic_core

from services.gateway.tinker.errors import invalid, unsupported
from services.gateway.tinker.rows import RawDatum, train_payload
from services.gateway.tinker.tensors import NUMPY, Csr, RawTensor, integers, numbers
from shared.errors import Refused
from shared.operations.payload import Array, SampleResult, TrainPayload, TrainResult

__all__ = [
    "PARTS_PER_DATUM",
    "Asked",
    "asked",
    "parsed",
    "prompt_tokens",
    "sample_json",
    "tensor",
    "tensor_json",
    "too_many",
    "train_json",
]

PARTS_PER_DATUM = 64
"""Chunks and inputs of a datum, on average, that nobody needs more of."""

_TENSOR = {"data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices"}
_DATUM = {"model_input", "loss_fn_inputs"}
_INPUT = {"data", "loss_fn", "loss_fn_config"}


@dataclass(frozen=True)
class Asked:
    """One forward or forward_backward. `model_id` and `seq_id` are as sent."""

    model_id: Any
    seq_id: Any
    forward_only: bool
    content: Mapping[str, Any]

    def payload(self, max_elements: int) -> TrainPayload:
        """Raises Refused for content that is not allowed."""
        loss, config = self.content.get("loss_fn"), self.content.get("loss_fn_config") or {}
        return train_payload(_data(self.content["data"]), loss, config, max_elements)


def asked(body: bytes, forward_only: bool, max_data: int) -> Asked:
    """Raises Refused for what is no such request at all."""
    if body.count(b"{") > max_data * PARTS_PER_DATUM or body.count(b'"loss_fn_inputs"') > max_data:
        raise too_many(max_data)
    field = "forward_input" if forward_only else "forward_backward_input"
    found = _object(parsed(body), "the body", {field, "model_id", "seq_id", "type"})
    content = _object(found.get(field), field, _INPUT)
    data = content.get("data")
    if not isinstance(data, list):
        raise invalid(f"{field}.data: a list is needed")
    if len(data) > max_data:
        raise too_many(max_data)
    config = content.get("loss_fn_config")
    if config is not None and not isinstance(config, dict):
        raise invalid(f"{field}.loss_fn_config: an object is needed")
    return Asked(found.get("model_id"), found.get("seq_id"), forward_only, content)


def too_many(max_data: int) -> Refused:
    return Refused(f"the request has more than {max_data} data; send fewer at a time", "too_large", status=413)


def parsed(body: bytes) -> Any:
    try:
        return pydantic_core.from_json(body)
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}") from error


def prompt_tokens(model_input: Any, where: str) -> Array:
    """The tokens of a ModelInput. Raises Refused for images and audio, by name."""
    chunks = _object(model_input, where, {"chunks"}).get("chunks")
    if not isinstance(chunks, list):
        raise invalid(f"{where}.chunks: a list is needed")
    parts = [_chunk(chunk, f"{where}.chunks[{index}]") for index, chunk in enumerate(chunks)]
    return np.concatenate(parts) if parts else np.empty(0, NUMPY["int64"])


def tensor(found: Any, where: str) -> RawTensor:
    said = _object(found, where, _TENSOR)
    dtype, data = said.get("dtype"), said.get("data")
    if dtype not in ("int64", "float32"):
        raise invalid(f"{where}: dtype {str(dtype)[:40]!r} is not allowed; int64 and float32 are")
    if not isinstance(data, list):
        raise invalid(f"{where}.data: a flat list of numbers is needed")
    shape = said.get("shape")
    csr = None
    if said.get("sparse_crow_indices") is not None or said.get("sparse_col_indices") is not None:
        csr = Csr(
            integers(_list(said.get("sparse_crow_indices"), f"{where}.sparse_crow_indices"), where),
            integers(_list(said.get("sparse_col_indices"), f"{where}.sparse_col_indices"), where),
        )
    return RawTensor(
        dtype=dtype,
        values=numbers(data, dtype, where),
        shape=None if shape is None else tuple(integers(_list(shape, f"{where}.shape"), f"{where}.shape").tolist()),
        csr=csr,
    )


def tensor_json(array: Array) -> dict[str, Any]:
    dtype = "int64" if array.dtype.kind == "i" else "float32"
    return {"data": array.ravel().tolist(), "dtype": dtype, "shape": list(array.shape)}


def train_json(result: TrainResult) -> dict[str, Any]:
    return {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [{"logprobs": tensor_json(logprobs)} for logprobs in result.logprobs],
        "metrics": dict(result.metrics),
    }


def sample_json(result: SampleResult) -> dict[str, Any]:
    """NaN becomes null when it is written."""
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": sequence.stop_reason,
                "tokens": sequence.tokens.tolist(),
                "logprobs": sequence.logprobs.tolist(),
            }
            for sequence in result.sequences
        ],
    }
    if result.prompt_logprobs is not None:
        answer["prompt_logprobs"] = result.prompt_logprobs.tolist()
    if result.topk is not None:
        answer["topk_prompt_logprobs"] = [[list(pair) for pair in top] or None for top in result.topk]
    return answer


def _data(data: Sequence[Any]) -> Iterator[RawDatum]:
    for index, found in enumerate(data):
        where = f"data[{index}]"
        datum = _object(found, where, _DATUM)
        inputs = _object(datum.get("loss_fn_inputs"), f"{where}.loss_fn_inputs", None)
        yield RawDatum(
            prompt_tokens(datum.get("model_input"), f"{where}.model_input"),
            {name: tensor(value, f"{where}.loss_fn_inputs.{name[:40]}") for name, value in inputs.items()},
        )


def _chunk(found: Any, where: str) -> Array:
    chunk = _object(found, where, None)
    kind = chunk.get("type", "encoded_text")
    if kind != "encoded_text":
        raise unsupported(f"{where}: a chunk of type {str(kind)[:40]!r}", "send encoded_text")
    unknown = chunk.keys() - {"type", "tokens"}
    if unknown:
        raise invalid(f"{where}: there is no field {min(unknown)[:40]!r}")
    return integers(_list(chunk.get("tokens"), f"{where}.tokens"), f"{where}.tokens")


def _object(found: Any, where: str, known: set[str] | None) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise invalid(f"{where}: an object is needed")
    unknown = found.keys() - known if known is not None else set()
    if unknown:
        listed = ", ".join(sorted(known or ()))
        raise invalid(f"{where}: there is no field {min(unknown)[:40]!r}; its fields are: {listed}")
    return found


def _list(found: Any, where: str) -> list[Any]:
    if not isinstance(found, list):
        raise invalid(f"{where}: a list is needed")
    return found
