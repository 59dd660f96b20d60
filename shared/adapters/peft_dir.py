"""A PEFT directory from a training checkpoint, and back: names change, values do not.

In: `adapter.safetensors` as learners write it (module names, fp32). Out: `adapter_model.safetensors` as engines and
PEFT read it, the other way round, and the `.tar.gz` of such a directory. Invariant: both ways are exact to the byte,
and equal files give equal archives.
"""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from shared.adapters import layout
from shared.adapters.layout import Array
from shared.errors import Fatal

__all__ = ["COMPLETE_FILE", "pack", "serving_layout", "training_layout"]

COMPLETE_FILE = "checkpoint_complete"
"""Empty; Tinker's command line publishes no archive without it."""

# Floats hardly compress, so that more work would gain nothing.
_COMPRESSION = 1


def serving_layout(training: bytes) -> bytes:
    """`adapter.safetensors` → `adapter_model.safetensors`. Raises Fatal for what no learner wrote."""
    return layout.tensor_file_bytes(
        {f"{layout.SERVING_PREFIX}{name}": tensor for name, tensor in _float32(training).items()}
    )


def training_layout(serving: Mapping[str, Array]) -> bytes:
    """Tensors by serving name → the bytes of `adapter.safetensors`, equal to a learner's for equal values."""
    named = {name.removeprefix(layout.SERVING_PREFIX): tensor for name, tensor in serving.items()}
    return bytes(safetensors.numpy.save({n: np.ascontiguousarray(t, dtype="<f4") for n, t in sorted(named.items())}))


def pack(files: Mapping[str, Path], archive: Path) -> None:
    """Write the `.tar.gz` of `files` by their names. Blocks; one piece of one file is in memory at a time."""
    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", _COMPRESSION, raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name in sorted(files):
            # Of a fresh TarInfo owner, times and mode are the same everywhere.
            entry = tarfile.TarInfo(name)
            entry.size = files[name].stat().st_size
            with files[name].open("rb") as file:
                tar.addfile(entry, file)


def _float32(training: bytes) -> dict[str, Array]:
    try:
        tensors: dict[str, Array] = safetensors.numpy.load(training)
    except (SafetensorError, ValueError, KeyError) as error:
        raise Fatal(f"the adapter of the training checkpoint cannot be read: {error}") from error
    other = sorted(name for name, tensor in tensors.items() if tensor.dtype != np.float32)
    if other:
        raise Fatal(f"tensor {other[0]!r} of the training checkpoint is {tensors[other[0]].dtype}, not float32")
    return tensors
