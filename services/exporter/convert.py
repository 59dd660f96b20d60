"""The training layout becomes the serving layout: two files whose bytes depend on the adapter alone.

In: the files of a committed training checkpoint. Out: `adapter_model.safetensors`,
`adapter_config.json` and their manifest, admitted as an engine would. Values pass through unscaled:
alpha and rsLoRA are the config's. Invariant: the bytes that come in are only read, and what an engine
could not load never leaves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from mint_schemas.commands import ExportRequested
from mint_schemas.common import FileRef
from pydantic import ValidationError
from safetensors import SafetensorError

from shared.adapters import layout
from shared.adapters.admission import admit
from shared.adapters.host import Host
from shared.adapters.manifest import Manifest, Probe, TensorSpec
from shared.engine.port import AdapterRefused
from shared.errors import Fatal
from shared.rl.checkpoint import ADAPTER_FILE, PROBE_FILE, STATE_FILE, TrainingState, read_state
from shared.store import keys

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Exported:
    """`files`: the two adapter files by name; the manifest names them as blobs."""

    files: dict[str, bytes]
    manifest: Manifest


def convert(command: ExportRequested, files: Mapping[str, bytes], host: Host, scratch: Path) -> Exported:
    """Write the serving files into `scratch` (an empty directory), prove them there, and return them.

    Raises Fatal naming the tensor or field for what an engine could not load."""
    state = read_state(files[STATE_FILE])
    _check_state(command, state, host)
    tensors = _serving_tensors(files[ADAPTER_FILE])
    written = {
        layout.TENSOR_FILE: layout.tensor_file_bytes(tensors),
        layout.CONFIG_FILE: layout.config_bytes(
            state.base, state.rank, state.alpha, state.use_rslora, state.target_modules
        ),
    }
    for name, data in written.items():
        (scratch / name).write_bytes(data)
    probe = _probe(files.get(PROBE_FILE))
    manifest = _manifest(command, state, host, written, scratch / layout.TENSOR_FILE, probe)
    try:
        admit(manifest, scratch, host)
    except AdapterRefused as error:
        raise Fatal(f"step {command.step} of {command.policy} cannot be served: {error}") from error
    return Exported(written, manifest)


def _check_state(command: ExportRequested, state: TrainingState, host: Host) -> None:
    lora = command.lora
    for what, found, wanted in (
        ("policy", state.policy, command.policy),
        ("run_id", state.run_id, command.run_id),
        ("base", state.base, command.base),
        ("base_sha256", state.base_sha256, host.base_sha256),
        ("step", state.step, command.step),
        ("rank", state.rank, lora.rank),
        ("alpha", state.alpha, lora.alpha),
        ("use_rslora", state.use_rslora, lora.use_rslora),
        ("target_modules", sorted(state.target_modules), sorted(lora.target_modules)),
    ):
        if found != wanted:
            raise Fatal(
                f"{command.policy}: the training checkpoint's {what} is {found!r}, the export asks for {wanted!r}"
            )


def _serving_tensors(data: bytes) -> dict[str, Array]:
    """By serving name, fp32. Names are prefixed only: admission refuses each that is no plain LoRA."""
    try:
        tensors = safetensors.numpy.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise Fatal(f"{ADAPTER_FILE} of the training checkpoint cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32:
            raise Fatal(f"tensor {name!r} of {ADAPTER_FILE} is {tensor.dtype}; training checkpoints hold float32")
        if name.endswith(".lora_B.weight") and name.replace(".lora_B.", ".lora_A.") not in tensors:
            raise Fatal(f"tensor {name!r} of {ADAPTER_FILE} has no lora_A beside it")
    return {f"{layout.SERVING_PREFIX}{name}": tensor for name, tensor in tensors.items()}


def _probe(data: bytes | None) -> Probe | None:
    if data is None:
        return None
    try:
        return Probe.model_validate_json(data)
    except ValidationError as error:
        raise Fatal(f"{PROBE_FILE} of the training checkpoint cannot be read: {error}") from error


def _manifest(
    command: ExportRequested,
    state: TrainingState,
    host: Host,
    written: Mapping[str, bytes],
    tensor_file: Path,
    probe: Probe | None,
) -> Manifest:
    headers = layout.read_headers(tensor_file)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in written.items()}
    return Manifest(
        revision="",
        policy=command.policy,
        base=state.base,
        base_sha256=state.base_sha256,
        tokenizer_sha256=host.tokenizer_sha256,
        chat_template_sha256=host.chat_template_sha256,
        rank=state.rank,
        alpha=state.alpha,
        use_rslora=state.use_rslora,
        target_modules=tuple(sorted(state.target_modules)),
        tensors=tuple(TensorSpec(name=n, shape=headers[n].shape, dtype="F32") for n in sorted(headers)),
        files={
            name: FileRef(key=keys.blob(digests[name]), sha256=digests[name], size=len(data))
            for name, data in written.items()
        },
        adapter_sha256=layout.adapter_sha256(digests),
        parent=command.parent,
        run_id=command.run_id,
        step=command.step,
        zero_delta=layout.is_zero_delta(tensor_file, headers),
        probe=probe,
    )
