"""Training checkpoints: everything that the next step needs, as files.

A slot goes in, `adapter.safetensors`, `optimizer.safetensors`, `gradients.safetensors` (where some are
accumulated) and `state.json` come out, and back.
Nothing of a step is random but what its (seed, step) derives, so these two are the RNG and the data
position. Invariant: a slot restored from its files continues to the same bytes, at equal batch shapes
and thread count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from mint_schemas.commands import CheckpointRef
from safetensors import SafetensorError
from safetensors.torch import load, save

from services.learner.slots import Slot, SlotShape
from shared.adapters.layout import canonical_json
from shared.errors import Fatal
from shared.rl.checkpoint import (
    ADAPTER_FILE,
    GRADIENTS_FILE,
    OPTIMIZER_FILE,
    PROBE_FILE,
    STATE_FILE,
    TrainingState,
    read_state,
)


@dataclass(frozen=True)
class Origin:
    """What a checkpoint says about where it comes from."""

    policy: str
    run_id: str
    base: str
    base_sha256: str
    seed: int


def adapter_bytes(slot: Slot) -> bytes:
    """`adapter.safetensors`: fp32, the same values give the same bytes."""
    return save({name: p.detach().float().cpu().contiguous() for name, p in slot.parameters.items()})


def dump(slot: Slot, origin: Origin, step: int) -> dict[str, bytes]:
    """The files of a slot's state after `step`."""
    moments = {f"{name}.m1": tensor.cpu() for name, tensor in slot.optimizer.first.items()}
    moments |= {f"{name}.m2": tensor.cpu() for name, tensor in slot.optimizer.second.items()}
    state = TrainingState(
        **vars(origin),
        **vars(slot.shape),
        step=step,
        optimizer_step=slot.optimizer.step_count,
        accumulated=slot.accumulated,
    )
    files = {
        ADAPTER_FILE: adapter_bytes(slot),
        OPTIMIZER_FILE: save(moments),
        STATE_FILE: canonical_json(state.model_dump(mode="json")),
    }
    if slot.gradients is not None:
        files[GRADIENTS_FILE] = save({name: tensor.cpu() for name, tensor in slot.gradients.items()})
    return files


def restore(slot: Slot, files: Mapping[str, bytes], base_sha256: str, fresh_optimizer: bool) -> None:
    """Put a slot into a checkpoint's state. Without `optimizer.safetensors`, or on request, the moments
    are zero and no gradients are accumulated. Raises Fatal, before anything is changed, for files that do
    not fit the slot or the base."""
    state = read_state(files[STATE_FILE])
    if state.base_sha256 != base_sha256:
        raise Fatal(
            f"the training checkpoint is of base {state.base_sha256[:12]}…, this learner's is {base_sha256[:12]}…"
        )
    shape = SlotShape(state.rank, state.alpha, state.use_rslora, state.target_modules)
    if shape != slot.shape:
        raise Fatal(f"the training checkpoint has {shape}, the run asks for {slot.shape}; they must be equal")
    adapter = _tensors(ADAPTER_FILE, files[ADAPTER_FILE], slot, {""})
    moments: dict[str, torch.Tensor] = {}
    gradients: dict[str, torch.Tensor] = {}
    if OPTIMIZER_FILE in files and not fresh_optimizer:
        moments = _tensors(OPTIMIZER_FILE, files[OPTIMIZER_FILE], slot, {".m1", ".m2"})
        if state.accumulated:
            gradients = _tensors(GRADIENTS_FILE, files.get(GRADIENTS_FILE, b""), slot, {""})
    slot.forget_gradients()
    slot.optimizer.reset()
    with torch.no_grad():
        for name, parameter in slot.parameters.items():
            parameter.copy_(adapter[name])
            if moments:
                slot.optimizer.first[name].copy_(moments[f"{name}.m1"])
                slot.optimizer.second[name].copy_(moments[f"{name}.m2"])
    slot.optimizer.step_count = state.optimizer_step if moments else 0
    if gradients:
        slot.restore_gradients(gradients, state.accumulated)


def identity(checkpoint: CheckpointRef) -> str:
    """Names the state that a checkpoint restores: the sha256 of each of its files but the probe."""
    named = sorted((name, ref.sha256) for name, ref in checkpoint.files.items() if name != PROBE_FILE)
    return hashlib.sha256(canonical_json([list(pair) for pair in named])).hexdigest()


def _tensors(file: str, data: bytes, slot: Slot, suffixes: set[str]) -> dict[str, torch.Tensor]:
    try:
        tensors = load(data)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise Fatal(f"{file} of the training checkpoint cannot be read: {error}") from error
    wanted = {f"{name}{suffix}": p.shape for name, p in slot.parameters.items() for suffix in suffixes}
    differing = [name for name in wanted.keys() | tensors.keys() if name not in wanted or name not in tensors]
    differing += [name for name in wanted.keys() & tensors.keys() if wanted[name] != tensors[name].shape]
    if differing:
        raise Fatal(f"{file} of the training checkpoint does not fit the slot at {sorted(differing)[:3]}")
    return tensors
