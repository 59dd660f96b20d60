"""Reverse KL from a policy to a reference, over the whole vocabulary: Σ_v p_s (log p_s − log p_ref).

Rows of student and reference tokens in, one weighed divergence per row out. Logits of both are divided by
the temperature; there is no T² factor. Invariant: no gradient reaches the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.learner.batch import Batch, Part
from services.learner.datum import Datum, check_datums
from services.learner.heads import not_finite
from services.learner.joint import Weighed
from services.learner.logprobs import parts
from services.learner.passes import Passes, by_row, flat_input
from services.learner.slots import Slot
from shared.errors import Fatal


@dataclass(frozen=True)
class KlRow:
    """The student's tokens and the reference's; the masked positions of both are the same targets, in
    order. `weights`: one for each of the student's positions."""

    name: str
    student_ids: tuple[int, ...]
    student_mask: tuple[bool, ...]
    reference_ids: tuple[int, ...]
    reference_mask: tuple[bool, ...]
    weights: tuple[float, ...]

    def student(self) -> Datum:
        return Datum(self.name, self.student_ids, self.student_ids, self.student_mask, {"weights": self.weights})

    def reference(self) -> Datum:
        return Datum(self.name, self.reference_ids, self.reference_ids, self.reference_mask)


@dataclass(frozen=True)
class ReverseKl:
    """`losses[d]` = Σ weight·KL over row d; `loss` their sum."""

    loss: float
    losses: list[float]


def check_rows(rows: Sequence[KlRow], vocab_size: int, max_context: int) -> None:
    """Raises Fatal naming the row and the reason."""
    check_datums([row.student() for row in rows], frozenset(), vocab_size, max_context)
    check_datums([row.reference() for row in rows], frozenset(), vocab_size, max_context)
    for row in rows:
        if sum(row.student_mask) != sum(row.reference_mask):
            raise Fatal(
                f"row {row.name}: {sum(row.student_mask)} target positions of the student, "
                f"{sum(row.reference_mask)} of the reference"
            )


class ReverseKlHead:
    """Of `rows`, whose students are the data. `reference` None = the base, adapter off."""

    def __init__(self, passes: Passes, reference: Slot | None, rows: Sequence[KlRow], temperature: float) -> None:
        self._passes, self._temperature = passes, temperature
        self._span = reference.span if reference else None
        self._references = [row.reference() for row in rows]

    def __call__(self, indices: Sequence[int], rows: Sequence[Datum], logits: Tensor) -> Weighed:
        references = [self._references[index] for index in indices]
        with torch.no_grad():
            (reference,) = self._passes.logits(Batch([Part(0, indices, references, self._span)]))
        divergence = reverse_kl_divergence(logits, reference, self._temperature)
        weighed = divergence * flat_input(rows, "weights", divergence)
        return Weighed(weighed.sum(), by_row(rows, weighed.detach()), not_finite(rows, weighed))


def reverse_kl_divergence(student: Tensor, reference: Tensor, temperature: float) -> Tensor:
    """Logits [N, V] of both → [N], fp32 or better."""
    result: Tensor = _ReverseKl.apply(student, reference, temperature)
    return result


class _ReverseKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, reference: Tensor, temperature: float) -> Tensor:
        precise = torch.promote_types(student.dtype, torch.float32)
        divergence = torch.empty(len(student), dtype=precise, device=student.device)
        for part in parts(student):
            ours = torch.log_softmax(student[part].to(precise) / temperature, dim=-1)
            theirs = torch.log_softmax(reference[part].to(precise) / temperature, dim=-1)
            divergence[part] = (ours.exp() * (ours - theirs)).sum(dim=-1)
        ctx.save_for_backward(student, reference, divergence)
        ctx.temperature = temperature
        return divergence

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """dKL/d logit_v = p_v (log p_v − log p_ref,v − KL) / T."""
        (gradient,) = gradients
        student, reference, divergence = ctx.saved_tensors
        result = torch.empty_like(student)
        for part in parts(student):
            ours = torch.log_softmax(student[part].to(divergence.dtype) / ctx.temperature, dim=-1)
            theirs = torch.log_softmax(reference[part].to(divergence.dtype) / ctx.temperature, dim=-1)
            slope = ours.exp() * (ours - theirs - divergence[part, None])
            result[part] = slope * (gradient[part, None] / ctx.temperature)
        return result, None, None
