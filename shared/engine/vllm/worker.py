"""What runs inside vLLM's worker process: reading back what an adapter became there.

vLLM mixes this class into its worker; the engine calls it by `collective_rpc`. Method names carry a
prefix since they share one namespace with the worker's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from shared.adapters import layout
from shared.engine.vllm import executor, grouped


class WorkerExtension:
    model_runner: Any

    def mint_group_lora(self) -> int:
        """Install the grouped CPU operators. Returns the number of modules that can carry LoRA."""
        manager = self._mint_manager()
        grouped.install(manager)
        return len(manager.modules)

    def mint_spin_shortly(self) -> None:
        executor.spin_shortly()

    def mint_slots(self) -> list[int]:
        """The adapter ids that are in slots now."""
        return [i for i in self._mint_manager().lora_index_to_id if i is not None]

    def mint_read_back(self, lora_id: int, directory: str, scaling: float) -> dict[str, Any]:
        """Compare the slot of an adapter with its file.

        `applied`: the (packed) modules that took weights; `expected`: those that the file has weights
        for, and each of the file's modules that no packed one covers; `equal`: every tensor of the
        slot is the file's as packed, scaled and cast, and zero elsewhere."""
        manager = self._mint_manager()
        manager.activate_adapter(lora_id)
        slot = manager.lora_index_to_id.index(lora_id)
        taken = set(manager.get_adapter(lora_id).loras)
        tensors = load_file(Path(directory) / layout.TENSOR_FILE)
        left = {split[0] for name in tensors if (split := layout.split_serving_name(name))}
        applied = expected = 0
        equal = True
        for name, module in manager.modules.items():
            parts = manager.packed_modules.get(name) or [name]
            if not left.isdisjoint(parts):
                expected += 1
                applied += name in taken
            left.difference_update(parts)
            equal = equal and _slot_equals(module, slot, parts, tensors, scaling)
        return {"applied": applied, "expected": expected + len(left), "equal": equal}

    def _mint_manager(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager


def _slot_equals(module: Any, slot: int, parts: list[str], tensors: dict[str, torch.Tensor], scaling: float) -> bool:
    stacks = list(zip(module.lora_a_stacked, module.lora_b_stacked, strict=True))
    if len(stacks) != len(parts):
        return False
    for part, (a_stack, b_stack) in zip(parts, stacks, strict=True):
        a = tensors.get(layout.serving_name(part, "lora_A"))
        b = tensors.get(layout.serving_name(part, "lora_B"))
        # vLLM casts first and scales B in the cast dtype.
        scaled = None if b is None else b.to(b_stack.dtype) * scaling
        if not _padded_equal(a_stack[slot, 0], a) or not _padded_equal(b_stack[slot, 0], scaled):
            return False
    return True


def _padded_equal(padded: torch.Tensor, value: torch.Tensor | None) -> bool:
    expected = torch.zeros_like(padded)
    if value is not None:
        expected[: value.shape[0], : value.shape[1]] = value
    return torch.equal(padded, expected)
