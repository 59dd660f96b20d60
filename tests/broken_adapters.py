"""Adapters that no engine may see: each a way to damage a good one, and what its refusal must name.

The manifest is made true to the damaged files, size and digests included, so that what is refused is what they
hold and never that they changed.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shared.adapters import layout
from shared.adapters.manifest import Manifest, TensorSpec
from shared.bases import Base
from tests.adapters import lora_tensors, true_files, write_adapter

REVISION = "acme/broken@1"
RANK = 4
DTYPES = {"F64": "<f8", "I8": "<i1", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}

Damage = Callable[[Path, Base], Manifest]


def write_broken(directory: Path, base: Base, damage: Damage) -> Manifest:
    """The damaged files in `directory` (made anew) and a manifest that is true to them."""
    manifest = damage(directory, base)
    return true_files(manifest, directory)


def _good(directory: Path, base: Base, **adapter: Any) -> Manifest:
    return write_adapter(directory, base, REVISION, rank=RANK, seed=1, std=0.2, **adapter)


def _bytes(change: Callable[[bytes], bytes]) -> Damage:
    def damage(directory: Path, base: Base) -> Manifest:
        manifest = _good(directory, base)
        path = directory / layout.TENSOR_FILE
        path.write_bytes(change(path.read_bytes()))
        return manifest

    return damage


def _header(change: Callable[[list[tuple[str, Any]]], object]) -> Damage:
    """Change the header's entries, which are given in order; the data stays."""

    def rewrite(data: bytes) -> bytes:
        length = struct.unpack("<Q", data[:8])[0]
        entries = list(json.loads(data[8 : 8 + length]).items())
        change(entries)
        raw = ("{" + ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in entries) + "}").encode()
        return struct.pack("<Q", len(raw)) + raw + data[8 + length :]

    return _bytes(rewrite)


def _offsets(start: Any, end: Any) -> Damage:
    """Other offsets for the second tensor."""
    return _header(lambda entries: entries[2][1].update(data_offsets=[start, end]))


def _shifted(entries: list[tuple[str, Any]]) -> None:
    """The second tensor begins within the first."""
    entries[2][1]["data_offsets"] = [offset - 4 for offset in entries[2][1]["data_offsets"]]


def _twice(entries: list[tuple[str, Any]]) -> None:
    entries.append(entries[1])


def _text(raw: bytes) -> Damage:
    return _bytes(lambda data: struct.pack("<Q", len(raw)) + raw)


def _tensors(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(directory: Path, base: Base) -> Manifest:
        tensors = lora_tensors(base, RANK, seed=1, std=0.2)
        change(tensors)
        with np.errstate(invalid="ignore"):
            return write_adapter(directory, base, REVISION, rank=RANK, tensors=tensors)

    return damage


def _value(value: float) -> Damage:
    def change(tensors: dict[str, Any]) -> None:
        tensors[sorted(tensors)[-1]][0, 0] = value

    return _tensors(change)


def stored_as(dtype: str, value: float | None = None) -> Damage:
    """Every tensor in another dtype, with one value of the last tensor put in as it is."""

    def damage(directory: Path, base: Base) -> Manifest:
        manifest = _good(directory, base)
        tensors = lora_tensors(base, RANK, seed=1, std=0.2)
        if value is not None:
            tensors[sorted(tensors)[-1]][0, 0] = value
        header: dict[str, Any] = {}
        blobs, at = [], 0
        for name in sorted(tensors):
            array = tensors[name].astype("<f4")
            stored = (array.view(np.uint32) >> 16).astype("<u2") if dtype == "BF16" else array.astype(DTYPES[dtype])
            blobs.append(stored.tobytes())
            header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [at, at + stored.nbytes]}
            at += stored.nbytes
        raw = json.dumps(header).encode()
        (directory / layout.TENSOR_FILE).write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(blobs))
        specs = tuple(TensorSpec.model_construct(name=s.name, shape=s.shape, dtype=dtype) for s in manifest.tensors)
        return manifest.model_copy(update={"tensors": specs})

    return damage


def _pickled(directory: Path, base: Base) -> Manifest:
    manifest = _good(directory, base)
    (directory / layout.TENSOR_FILE).rename(directory / "adapter_model.bin")
    (directory / "adapter_model.bin").write_bytes(pickle.dumps({"weights": [1.0]}))
    return manifest


def _extra(name: str) -> Damage:
    def damage(directory: Path, base: Base) -> Manifest:
        manifest = _good(directory, base)
        (directory / name).write_bytes(b"anything")
        return manifest

    return damage


def _other_rank(directory: Path, base: Base) -> Manifest:
    """The config and the manifest say 4; the tensors have 8."""
    manifest = write_adapter(directory, base, REVISION, rank=8, std=0.2)
    config = layout.config_bytes(base.name, RANK, 16.0, False, base.target_modules)
    (directory / layout.CONFIG_FILE).write_bytes(config)
    return manifest.model_copy(update={"rank": RANK})


def _of_another_base(directory: Path, base: Base) -> Manifest:
    return _good(directory, base).model_copy(update={"base_sha256": "e" * 64})


def _without_b(tensors: dict[str, Any]) -> None:
    del tensors[next(name for name in sorted(tensors) if "lora_B" in name)]


def _module_beyond(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if "layers.0.mlp.down_proj" in name]:
        tensors[name.replace("layers.0.", "layers.99.")] = tensors[name]


BROKEN: dict[str, tuple[Damage, str]] = {
    "truncated": (_bytes(lambda data: data[: len(data) // 2]), r"adapter_model\.safetensors is truncated"),
    "zero bytes": (_bytes(lambda data: b""), r"adapter_model\.safetensors is empty"),
    "shorter than a header": (_bytes(lambda data: data[:5]), "too short for a safetensors header"),
    "more than its tensors": (_bytes(lambda data: data + b"\0" * 64), "longer than its tensors"),
    "a header of 2^60 bytes": (
        _bytes(lambda data: struct.pack("<Q", 2**60) + data[8:]),
        rf"adapter_model\.safetensors claims a header of {2**60} bytes",
    ),
    "a header of 200 MB": (
        _bytes(lambda data: struct.pack("<Q", 200 * 10**6) + data[8:]),
        r"adapter_model\.safetensors claims a header of 200000000 bytes",
    ),
    "a header that is no JSON": (_text(b"{" * 64), r"adapter_model\.safetensors has a header that is not"),
    "a header that nests without end": (_text(b"[" * 2**20), r"adapter_model\.safetensors has a header that is not"),
    "a pickle under the name": (_bytes(lambda data: pickle.dumps([1.0] * 99)), r"adapter_model\.safetensors claims"),
    "a pickle instead": (_pickled, r"holds 'adapter_model\.bin' beside"),
    "another file": (_extra("new_embeddings.safetensors"), r"holds 'new_embeddings\.safetensors' beside"),
    "overlapping tensors": (_header(_shifted), "does not follow the one before it"),
    "offsets behind the end": (_offsets(2**40, 2**40 + 16), "does not follow the one before it"),
    "offsets below zero": (_offsets(-16, 0), "does not follow the one before it"),
    "offsets that are no integers": (_offsets(0.5, 1e400), "offset of the wrong type"),
    "a name given twice": (_header(_twice), r"lora_A\.weight' is named twice"),
    "bytes as weights": (stored_as("I8"), r"lora_A\.weight' is I8; allowed"),
    "doubles as weights": (stored_as("F64"), r"lora_A\.weight' is F64; allowed"),
    "NaN in F32": (_value(np.nan), r"lora_B\.weight' holds values that are not finite"),
    "infinity in F32": (_value(-np.inf), r"lora_B\.weight' holds values that are not finite"),
    "NaN in BF16": (stored_as("BF16", np.nan), r"lora_B\.weight' holds values that are not finite"),
    "infinity in BF16": (stored_as("BF16", np.inf), r"lora_B\.weight' holds values that are not finite"),
    "NaN in F16": (stored_as("F16", np.nan), r"lora_B\.weight' holds values that are not finite"),
    "infinity in F16": (stored_as("F16", -np.inf), r"lora_B\.weight' holds values that are not finite"),
    "tensors of another rank": (_other_rank, r"lora_A\.weight' has shape \[8, \d+\]; the base needs \[4, \d+\]"),
    "another base": (_of_another_base, "base_sha256 is 'eeee"),
    "half of a pair": (_tensors(_without_b), "has no lora_B"),
    "a module that the base lacks": (_tensors(_module_beyond), r"'model\.layers\.99\.mlp\.down_proj' is no target"),
}
