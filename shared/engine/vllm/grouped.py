"""LoRA on CPU, grouped by slot: two matrix products per adapter in the batch.

vLLM's own CPU operators gather padded weights for every token, so that their cost grows with the
engine's maximum rank, and they serve tokens without LoRA (index -1) through the last slot
(vllm#48421). These compute y[rows] += x[rows]·Aᵀ·Bᵀ for the rows of each slot, at the adapter's own
rank, and leave the other rows alone.

They stand on internals of the versions in `VERSIONS`; with any other version the engine keeps vLLM's
operators and sends base requests through a pinned zero adapter.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

VERSIONS = frozenset({"0.32.0"})

Rows: TypeAlias = "slice | torch.Tensor"


def group_by_slot(indices: torch.Tensor) -> list[tuple[int, Rows]]:
    """The rows of each slot; -1 (no LoRA) is left out. Neighbouring rows come as a slice, a view."""
    groups: list[tuple[int, Rows]] = []
    for slot in sorted(set(indices.tolist()) - {-1}):
        rows = torch.nonzero(indices == slot).flatten()
        first, last = int(rows[0]), int(rows[-1])
        groups.append((slot, slice(first, last + 1) if last - first + 1 == len(rows) else rows))
    return groups


def install(manager: Any) -> None:
    """Replace the operators of one worker. `manager` is vLLM's LoRAModelManager."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    class Grouped(PunicaWrapperCPU):
        groups: list[tuple[int, Rows, int]]

        def update_metadata(self, mapping: Any, lora_index_to_id: list[int | None], *args: Any, **kwargs: Any) -> None:
            super().update_metadata(mapping, lora_index_to_id, *args, **kwargs)
            self.groups = [
                (slot, rows, manager.get_adapter(lora_index_to_id[slot]).rank)
                for slot, rows in group_by_slot(self.token_lora_indices)
            ]

        def add_lora_linear(
            self,
            y: torch.Tensor,
            x: torch.Tensor,
            lora_a_stacked: tuple[torch.Tensor, ...],
            lora_b_stacked: tuple[torch.Tensor, ...],
            scale: float,
            output_slices: tuple[int, ...],
            **kwargs: Any,
        ) -> None:
            y_TO, x_TI = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
            for slot, rows, rank in self.groups:
                taken = x_TI[rows]
                at = 0
                for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                    low = taken @ a[slot, 0, :rank].T
                    y_TO[rows, at : at + width] += scale * (low @ b[slot, 0, :, :rank].T)
                    at += width

    for wrapper in manager.punica_wrapper_mapping.values():
        if type(wrapper) is not PunicaWrapperCPU:
            raise TypeError(f"the LoRA operators are {type(wrapper)}; grouped ones replace PunicaWrapperCPU only")
        wrapper.__class__ = Grouped
        wrapper.groups = []
