"""What an operation asks and answers, decoded from its wire: plain values and arrays, the same for JSON and
protobuf clients.

In: payloads and results. Out: canonical bytes (a JSON head, then the arrays) whose sha256 is the digest that
makes an operation idempotent. Invariant: `decode(encode(x)) == x`, and equal payloads have equal bytes
whatever wire they came over.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

__all__ = [
    "AdamPayload",
    "Array",
    "KlRow",
    "LoadPayload",
    "Payload",
    "ReverseKlPayload",
    "ReverseKlResult",
    "Row",
    "SamplePayload",
    "SampleResult",
    "SavePayload",
    "SavedResult",
    "Sequence",
    "StepResult",
    "TrainPayload",
    "TrainResult",
    "decode",
    "digest",
    "encode",
]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
"""int64 or float32, C-contiguous, little-endian."""

MAX_HEAD_BYTES = 64 << 20


@dataclass(frozen=True)
class Row:
    """One datum: `tokens` int64 [T] (the model's input); `inputs` name → dense array whose first axis is T
    (target_tokens, weights, logprobs, advantages, …). Position i predicts target_tokens[i]."""

    tokens: Array
    inputs: dict[str, Array]


@dataclass(frozen=True)
class TrainPayload:
    """forward and forward_backward."""

    rows: tuple[Row, ...]
    loss: str
    config: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AdamPayload:
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class KlRow:
    """All int64 but `weights` (float32): student_input [T], reference_input [R], target_tokens [T], weights [T]."""

    student_input: Array
    reference_input: Array
    target_tokens: Array
    weights: Array


@dataclass(frozen=True)
class ReverseKlPayload:
    """`reference` is the tinker:// path of the frozen model."""

    rows: tuple[KlRow, ...]
    reference: str
    temperature: float = 1.0


@dataclass(frozen=True)
class SavePayload:
    """`kind` weights: a training checkpoint; sampler_weights: a revision. `name` empty: an ephemeral one, for the
    sampling session `sampling_session_seq_id`."""

    kind: Literal["weights", "sampler_weights"]
    name: str = ""
    ttl_s: float | None = None
    overwrite: bool = False
    sampling_session_seq_id: int | None = None


@dataclass(frozen=True)
class LoadPayload:
    path: str
    optimizer: bool = False


@dataclass(frozen=True)
class SamplePayload:
    """`stop_strings` and `stop_tokens` exclude each other; `topk_prompt_logprobs` 0 = none. `ignore_eos`: nothing but
    `max_tokens` ends a sequence, where else the base's end-of-sequence tokens do."""

    prompt: Array
    num_samples: int
    max_tokens: int | None = None
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True)
class TrainResult:
    """`logprobs[i]` float32 [T_i] of the targets of row i. `metrics` keys are `name:reduction`."""

    logprobs: tuple[Array, ...]
    metrics: dict[str, float]


@dataclass(frozen=True)
class StepResult:
    metrics: dict[str, float]


@dataclass(frozen=True)
class ReverseKlResult:
    losses: tuple[float, ...]
    metrics: dict[str, float]


@dataclass(frozen=True)
class SavedResult:
    """What a save, load, copy, unload or create answers; fields that do not apply are empty."""

    path: str = ""
    sampling_session_id: str = ""
    note: str = ""


@dataclass(frozen=True)
class Sequence:
    """The stop token is included once, last."""

    tokens: Array
    logprobs: Array
    stop_reason: Literal["length", "stop"]


@dataclass(frozen=True)
class SampleResult:
    """`prompt_logprobs` float32 [P], NaN first. `topk` per prompt position: [[token, logprob], …], or nothing for
    the first. `revision` and `adapter_sha256` say what sampled."""

    sequences: tuple[Sequence, ...]
    prompt_logprobs: Array | None = None
    topk: tuple[tuple[tuple[int, float], ...], ...] | None = None
    revision: str = ""
    adapter_sha256: str = ""


Payload = TrainPayload | AdamPayload | ReverseKlPayload | SavePayload | LoadPayload | SamplePayload
Result = TrainResult | StepResult | ReverseKlResult | SavedResult | SampleResult

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        TrainPayload,
        AdamPayload,
        ReverseKlPayload,
        SavePayload,
        LoadPayload,
        SamplePayload,
        TrainResult,
        StepResult,
        ReverseKlResult,
        SavedResult,
        SampleResult,
    )
}
_CLASSES: dict[str, Any] = _KINDS | {kind.__name__: kind for kind in (Row, KlRow, Sequence)}
_DTYPES: dict[str, np.dtype[Any]] = {"<f4": np.dtype("<f4"), "<i8": np.dtype("<i8")}
_ARRAY, _KIND, _MAP = "$array", "$kind", "$map"


def encode(value: Payload | Result) -> bytes:
    """Raises ValueError for an array that is neither int64 nor float32, and for a number that JSON lacks."""
    packer = _Packer()
    head = json.dumps(packer.pack(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(packer.arrays)


def decode(data: bytes) -> Payload | Result:
    """Arrays are views of `data`, read-only. Raises ValueError for bytes that `encode` did not write."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(MAX_HEAD_BYTES, len(data) - 8):
        raise ValueError(f"the head of an operation's bytes is cut: {len(data)} bytes in all")
    try:
        value = _unpack(json.loads(data[8 : 8 + size]), data, 8 + size)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"the bytes of an operation cannot be read: {error!r}") from error
    if type(value) not in _KINDS.values():
        raise ValueError("the bytes hold neither a payload nor a result")
    found: Payload | Result = value
    return found


def digest(data: bytes) -> str:
    """Of `encode`'s bytes: what makes two submissions the same operation."""
    return hashlib.sha256(data).hexdigest()


class _Packer:
    def __init__(self) -> None:
        self.arrays: list[bytes] = []
        self._end = 0

    def pack(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {_ARRAY: self._array(value)}
        if is_dataclass(value):
            return {
                _KIND: type(value).__name__,
                "v": {f.name: self.pack(getattr(value, f.name)) for f in fields(value)},
            }
        if isinstance(value, dict):
            return {_MAP: {str(key): self.pack(item) for key, item in sorted(value.items())}}
        if isinstance(value, list | tuple):
            return [self.pack(item) for item in value]
        return value

    def _array(self, value: Array) -> list[Any]:
        little = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
        if little.dtype.str not in _DTYPES:
            raise ValueError(f"an array of {value.dtype} cannot be an operation's; int64 and float32 can")
        place = self._end
        self.arrays.append(little.tobytes())
        self._end += little.nbytes
        return [little.dtype.str, list(value.shape), place]


def _unpack(packed: Any, data: bytes, start: int) -> Any:
    if isinstance(packed, list):
        return tuple(_unpack(item, data, start) for item in packed)
    if not isinstance(packed, dict):
        return packed
    if _ARRAY in packed:
        name, shape, place = packed[_ARRAY]
        dtype: np.dtype[Any] = _DTYPES[name]
        flat = np.frombuffer(data, dtype, int(np.prod(shape, dtype=np.int64)), start + place)
        return flat.reshape(shape)
    if _MAP in packed:
        return {key: _unpack(item, data, start) for key, item in packed[_MAP].items()}
    return _CLASSES[packed[_KIND]](**{name: _unpack(item, data, start) for name, item in packed["v"].items()})
