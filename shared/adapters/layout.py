"""The serving layout: what the two files of a revision are called, contain and hash to.

Owns `adapter_model.safetensors` (PEFT key names) and `adapter_config.json` (canonical bytes), and reads
tensors of such files with nothing but numpy, so that every service can look without torch. Writers
are the exporter and tests; readers are admission and the engines.

Invariant: equal adapters have equal bytes, so that `adapter_sha256` names content.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
SERVING_PREFIX = "base_model.model."
MAX_HEADER_BYTES = 16 * 2**20
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_CHUNK_BYTES = 2**20

Array = np.ndarray[Any, np.dtype[Any]]


class BadTensorFile(ValueError):
    """The file is no whole safetensors file; the message says where it breaks."""


@dataclass(frozen=True)
class TensorHeader:
    """One tensor's place: `start` and `end` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def canonical_json(value: object) -> bytes:
    """Sorted keys, no spaces, UTF-8, no NaN: one value has one spelling."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def config_bytes(base: str, rank: int, alpha: float, use_rslora: bool, target_modules: Iterable[str]) -> bytes:
    """The canonical `adapter_config.json` of a plain LoRA, as PEFT and vLLM read it."""
    return canonical_json(
        {
            "base_model_name_or_path": base,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": rank,
            "target_modules": sorted(target_modules),
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": use_rslora,
        }
    )


def adapter_sha256(files: Mapping[str, str]) -> str:
    """sha256 of the canonical JSON list of [file name, sha256], sorted by name, of both adapter files."""
    return hashlib.sha256(canonical_json([[name, files[name]] for name in (CONFIG_FILE, TENSOR_FILE)])).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def serving_name(module: str, part: str) -> str:
    """`model.layers.0.self_attn.q_proj`, `lora_A` → the tensor's name in the serving layout."""
    return f"{SERVING_PREFIX}{module}.{part}.weight"


def split_serving_name(name: str) -> tuple[str, str] | None:
    """The (module, `lora_A` or `lora_B`) of a serving name; None for any other name."""
    if not name.startswith(SERVING_PREFIX):
        return None
    for part in ("lora_A", "lora_B"):
        if name.endswith(f".{part}.weight"):
            return name[len(SERVING_PREFIX) : -len(f".{part}.weight")], part
    return None


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """The tensors of a safetensors file by name, read without its data.

    Raises BadTensorFile for a header that is huge, no JSON, or out of step with the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise BadTensorFile(f"{path.name} has {size} bytes; too short for a safetensors header")
        (length,) = struct.unpack("<Q", start)
        if length > MAX_HEADER_BYTES:
            raise BadTensorFile(f"{path.name} claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
        if 8 + length > size:
            raise BadTensorFile(f"{path.name} is truncated: header of {length} bytes in a file of {size}")
        raw = file.read(length)
    try:
        entries = json.loads(raw, object_pairs_hook=_each_once)
        headers = {name: _header(name, entry, 8 + length) for name, entry in entries.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadTensorFile(f"{path.name} has a header that is not a safetensors header: {error!r}") from error
    _check_extent(path.name, headers, 8 + length, size)
    return headers


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two entries of one name JSON readers keep either, and two readers may keep different ones."""
    once = dict(pairs)
    if len(once) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{name!r} is named twice")
    return once


def _header(name: str, entry: dict[str, Any], data_start: int) -> TensorHeader:
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if not isinstance(entry["dtype"], str) or any(type(n) is not int for n in (*shape, start, end)):
        raise ValueError(f"tensor {name!r} has a dtype, shape or offset of the wrong type")
    return TensorHeader(name, entry["dtype"], tuple(shape), data_start + start, data_start + end)


def _check_extent(name: str, headers: dict[str, TensorHeader], data_start: int, size: int) -> None:
    """Tensors lie one after the other and end where the file ends."""
    at = data_start
    for header in sorted(headers.values(), key=lambda h: (h.start, h.end)):
        width = DTYPE_BYTES.get(header.dtype)
        if header.start != at or header.end < header.start or any(n < 0 for n in header.shape):
            raise BadTensorFile(f"{name}: tensor {header.name!r} does not follow the one before it")
        if width is not None and header.end - header.start != width * int(np.prod(header.shape, dtype=object)):
            raise BadTensorFile(
                f"{name}: tensor {header.name!r} has {header.end - header.start} bytes, not its shape's"
            )
        at = header.end
    if at != size:
        state = "truncated" if at > size else "longer than its tensors"
        raise BadTensorFile(f"{name} is {state}: {size} bytes, its header asks for {at}")


def all_finite(path: Path, header: TensorHeader) -> bool:
    """Whether a tensor holds no NaN and no infinity, in both of which every bit of the exponent is set. Looks at
    the bits as they are stored: neither torch nor a float32 copy is needed. A file that ends early is not finite."""
    kind, exponent = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}[header.dtype]
    with path.open("rb") as file:
        file.seek(header.start)
        left = header.end - header.start
        while left:
            bits = np.frombuffer(file.read(min(left, _CHUNK_BYTES)), kind)
            if not bits.size or ((bits & exponent) == exponent).any():
                return False
            left -= bits.nbytes
    return True


def read_tensor(path: Path, header: TensorHeader) -> Array:
    """One tensor as float32 (exact for each of F32, BF16 and F16), in its shape."""
    with path.open("rb") as file:
        file.seek(header.start)
        data = file.read(header.end - header.start)
    if header.dtype == "BF16":
        flat = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        flat = np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[header.dtype]).astype(np.float32)
    return flat.reshape(header.shape)


def is_zero_delta(path: Path, tensors: Mapping[str, TensorHeader]) -> bool:
    """Whether every product B·A of a serving-layout file is zero, so that the adapter changes nothing."""
    for name, header in tensors.items():
        if not name.endswith(".lora_B.weight"):
            continue
        second = read_tensor(path, header)
        first = read_tensor(path, tensors[name.replace(".lora_B.weight", ".lora_A.weight")])
        if second.any() and (second @ first).any():
            return False
    return True


def tensor_file_bytes(tensors: Mapping[str, Array]) -> bytes:
    """Float32 tensors as safetensors bytes, sorted by name: the same tensors give the same bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    blobs, at = [], 0
    for name in sorted(tensors):
        blob = np.ascontiguousarray(tensors[name], dtype="<f4").tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensors[name].shape),
            "data_offsets": [at, at + len(blob)],
        }
        blobs.append(blob)
        at += len(blob)
    raw = canonical_json(header)
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + b"".join(blobs)
