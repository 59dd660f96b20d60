"""Forward passes over the resident base: a micro-batch in, the logits of its masked positions out.

Rows are packed end to end where the base's attention can be exchanged, else padded on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress

import torch
from torch import Tensor

from services.learner.base_model import ResidentBase
from services.learner.batch import Batch
from services.learner.datum import Datum
from services.learner.lora import Span
from services.learner.packing import packed


class Passes:
    """`logits` keeps what a backward pass needs, under grad mode."""

    def __init__(self, base: ResidentBase) -> None:
        self._base = base

    @property
    def padded(self) -> bool:
        return not self._base.packing

    def logits(self, batch: Batch) -> list[Tensor]:
        """[N, vocabulary] for each part, N its masked positions row by row."""
        flat = self._packed(batch) if self._base.packing else self._padded(batch)
        if len(batch.parts) == 1:
            return [flat]
        return list(flat.split([sum(row.weighed for row in part.rows) for part in batch.parts]))

    def _packed(self, batch: Batch) -> Tensor:
        rows, device = batch.rows, self._base.device
        lengths = [len(row.input_ids) for row in rows]
        ids = torch.tensor([[token for row in rows for token in row.input_ids]], device=device)
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
        kept = torch.tensor([taken for row in rows for taken in row.mask]).nonzero()[:, 0].to(device)
        with self._base.router.applied(_spans(batch, lengths)), packed(lengths):
            answer = self._base.module(input_ids=ids, position_ids=positions, logits_to_keep=kept, use_cache=False)
        logits: Tensor = answer.logits[0]
        return logits

    def _padded(self, batch: Batch) -> Tensor:
        rows, device = batch.rows, self._base.device
        longest = max(len(row.input_ids) for row in rows)
        masks = _pad([row.mask for row in rows], torch.bool)
        columns = masks.any(dim=0).nonzero()[:, 0]
        # padding stands on the right, so a causal base never attends to it from a position that counts
        ids = _pad([row.input_ids for row in rows], torch.long).to(device)
        with self._base.router.applied(_spans(batch, [longest] * len(rows))):
            answer = self._base.module(input_ids=ids, logits_to_keep=columns.to(device), use_cache=False)
        logits: Tensor = answer.logits[masks[:, columns].to(device)]
        return logits


def targets_of(rows: Sequence[Datum], device: torch.device) -> Tensor:
    """[N] the targets of the masked positions, row by row."""
    return torch.tensor([token for row in rows for token in compress(row.targets, row.target_mask)], device=device)


def flat_input(rows: Sequence[Datum], name: str, like: Tensor) -> Tensor:
    """[N] the named input at the masked positions, row by row."""
    values = [value for row in rows for value in compress(row.inputs[name], row.target_mask)]
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def by_row(rows: Sequence[Datum], flat: Tensor) -> list[list[float]]:
    """[N] back into rows of full length, 0.0 outside the masks."""
    values = iter(flat.tolist())
    return [[next(values) if taken else 0.0 for taken in row.target_mask] for row in rows]


def _spans(batch: Batch, widths: Sequence[int]) -> list[Span]:
    edges = [0, *accumulate(widths)]
    spans, row = [], 0
    for part in batch.parts:
        last = row + len(part.rows)
        if part.span is not None:
            spans.append(part.span(edges[row], edges[last]))
        row = last
    return spans


def _pad(rows: Sequence[Sequence[int | bool]], dtype: torch.dtype) -> Tensor:
    """[R, longest], zeros on the right."""
    padded = torch.zeros((len(rows), max(len(row) for row in rows)), dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded
