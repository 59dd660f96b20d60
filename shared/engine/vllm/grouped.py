"""LoRA on CPU, by slot: y[rows] += x[rows]·Aᵀ·Bᵀ for the rows of each adapter in the batch.

vLLM's own CPU operators gather padded weights for every token, so that their cost grows with the
engine's maximum rank, and they serve tokens without LoRA (index -1) through the last slot
(vllm#48421). These compute at the ranks that are in the batch and leave the other rows alone. Slots of
about as many rows each (a batch that decodes) go through two batched products together; of slots that are
far apart (one adapter's long prompt beside others' tokens) each has its own two.

They stand on internals of the versions in `VERSIONS`, also on stacked weights being zero beyond an adapter's
rank; with any other version the engine keeps vLLM's operators and sends base requests through a pinned zero
adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

VERSIONS = frozenset({"0.32.0"})

PADDING = 2
"""Padded rows of a batched product, per row that is there, above which slots go one by one."""
FEW = 64
"""Padded rows that cost next to nothing."""

Rows: TypeAlias = "slice | torch.Tensor"
Stacked: TypeAlias = "tuple[torch.Tensor, ...]"


@dataclass(frozen=True)
class Group:
    """One slot's rows, and its adapter's rank."""

    slot: int
    rows: Rows
    rank: int


@dataclass(frozen=True)
class Together:
    """All slots in one product, each padded to `most` rows. `taken`: the row of x of each padded one (any row for
    a pad); `rows`: those with LoRA, None = all of them; `places`: where among the padded ones they are."""

    slots: Rows
    most: int
    rank: int
    taken: torch.Tensor
    rows: torch.Tensor | None
    places: torch.Tensor


Plan: TypeAlias = "Together | Sequence[Group]"


def group_by_slot(indices: torch.Tensor, rank_of: Callable[[int], int]) -> list[Group]:
    """-1 (no LoRA) is left out. Neighbouring rows come as a slice, a view."""
    slots = sorted(set(indices.tolist()) - {-1})
    return [Group(slot, _compact(torch.nonzero(indices == slot).flatten()), rank_of(slot)) for slot in slots]


def plan(indices: torch.Tensor, rank_of: Callable[[int], int]) -> Plan:
    """How the rows of a step are computed, once for all of its layers. `indices` [rows]: the slot of each, or -1."""
    groups = group_by_slot(indices, rank_of)
    counts = torch.bincount(indices[indices >= 0], minlength=1)
    most, with_lora = int(counts.max()), int(counts.sum())
    if len(groups) < 2 or len(groups) * most > FEW + PADDING * with_lora:
        return groups
    slots = torch.tensor([group.slot for group in groups])
    rows = torch.argsort(indices, stable=True)[len(indices) - with_lora :]
    group = torch.repeat_interleave(torch.arange(len(groups)), counts[slots])
    within = torch.arange(with_lora) - torch.cumsum(counts[slots], 0)[group] + counts[slots][group]
    padded = group * most + within
    taken = torch.zeros(len(groups) * most, dtype=torch.long)
    taken[padded] = rows
    whole = with_lora == len(indices)
    in_order = torch.argsort(rows) if whole else torch.arange(with_lora)
    return Together(
        slots=_compact(slots),
        most=most,
        rank=max(it.rank for it in groups),
        taken=taken,
        rows=None if whole else rows,
        places=padded[in_order],
    )


def add_lora(y: torch.Tensor, x: torch.Tensor, a: Stacked, b: Stacked, scale: float, how: Plan) -> None:
    """In place. `y` [rows, Σ widths], `x` [rows, in]; of each slice of y `a` [slots, 1, max rank, in] and `b` [slots,
    1, width, max rank]."""
    if isinstance(how, Together):
        _add_together(y, x, a, b, scale, how)
        return
    for group in how:
        taken, at = x[group.rows], 0
        for first, second in zip(a, b, strict=True):
            low = taken @ first[group.slot, 0, : group.rank].T
            width = second.shape[2]
            y[group.rows, at : at + width] += scale * (low @ second[group.slot, 0, :, : group.rank].T)
            at += width


def _add_together(y: torch.Tensor, x: torch.Tensor, a: Stacked, b: Stacked, scale: float, how: Together) -> None:
    taken, at = x[how.taken].view(-1, how.most, x.shape[-1]), 0
    for first, second in zip(a, b, strict=True):
        low = torch.bmm(taken, first[how.slots, 0, : how.rank].transpose(1, 2))
        high = torch.bmm(low, second[how.slots, 0, :, : how.rank].transpose(1, 2))
        width = second.shape[2]
        added = scale * high.reshape(-1, width)[how.places]
        part = y[:, at : at + width]
        if how.rows is None:
            part[: len(added)] += added
        else:
            part.index_add_(0, how.rows, added)
        at += width


def _compact(numbers: torch.Tensor) -> Rows:
    first, last = int(numbers[0]), int(numbers[-1])
    return slice(first, last + 1) if last - first + 1 == len(numbers) else numbers


def install(manager: Any) -> None:
    """Replace the operators of one worker. `manager` is vLLM's LoRAModelManager."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    class Grouped(PunicaWrapperCPU):
        how: Plan

        def update_metadata(self, mapping: Any, lora_index_to_id: list[int | None], *args: Any, **kwargs: Any) -> None:
            super().update_metadata(mapping, lora_index_to_id, *args, **kwargs)
            self.how = plan(self.token_lora_indices, lambda slot: manager.get_adapter(lora_index_to_id[slot]).rank)

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
            add_lora(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), lora_a_stacked, lora_b_stacked, scale, self.how)

    for wrapper in manager.punica_wrapper_mapping.values():
        if type(wrapper) is not PunicaWrapperCPU:
            raise TypeError(f"the LoRA operators are {type(wrapper)}; grouped ones replace PunicaWrapperCPU only")
        wrapper.__class__ = Grouped
        wrapper.how = []
