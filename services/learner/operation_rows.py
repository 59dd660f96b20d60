"""Rows of an operation's payload as the training primitives take them.

In: decoded payloads. Out: datums, loss calls, optimizer settings. Invariant: what is wrong with a row is said with
the row's number, which is its place in the request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from services.learner.datum import Datum
from services.learner.heads import LossCall
from services.learner.optimizer import AdamParams
from services.learner.reverse_kl import KlRow
from shared.errors import Fatal
from shared.operations.payload import AdamPayload, Array, ReverseKlPayload, Row, TrainPayload
from shared.operations.payload import KlRow as PayloadKlRow

__all__ = ["LOSSES", "adam_params", "datums", "kl_rows", "logprobs_of", "loss_call"]

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
"""What operations may ask for. The others need what no request can carry."""

LARGEST = 1e30
"""What a setting of an optimizer step stays below, so that fp32 holds what is made of it."""

TARGETS, WIDE_LOSS = "target_tokens", "cross_entropy"


def loss_call(payload: TrainPayload) -> LossCall:
    """Raises Fatal, naming the known ones, for another loss."""
    if payload.loss not in LOSSES:
        raise Fatal(f"unknown loss {payload.loss!r}; known are {', '.join(LOSSES)}")
    return LossCall(payload.loss, dict(payload.config))


def datums(payload: TrainPayload) -> list[Datum]:
    """Every position takes part: its logprob is part of the answer, and the loss's own inputs say what it weighs.

    Rows of cross_entropy may have K targets a position, [T, K]; what a row has fewer than others is filled with
    targets of weight 0 (`logprobs_of` takes them away again)."""
    wide = max((_width(payload, str(number), row) for number, row in enumerate(payload.rows)), default=1)
    return [_datum(str(number), row, wide) for number, row in enumerate(payload.rows)]


def logprobs_of(payload: TrainPayload, logprobs: Sequence[Sequence[float]]) -> tuple[Array, ...]:
    """float32, each of its row's targets' shape."""
    found = []
    for row, values in zip(payload.rows, logprobs, strict=True):
        shape = row.inputs[TARGETS].shape
        array = np.asarray(values, np.float32).reshape(shape[0], -1)
        found.append(np.ascontiguousarray(array[:, : shape[1]]) if len(shape) == 2 else array[:, 0].copy())
    return tuple(found)


def kl_rows(payload: ReverseKlPayload) -> list[KlRow]:
    """Both inputs end with the same targets, so that they are laid end to end."""
    if not (math.isfinite(payload.temperature) and payload.temperature > 0):
        raise Fatal(f"temperature is {payload.temperature}; it must be above 0")
    return [_kl_row(str(number), row) for number, row in enumerate(payload.rows)]


def adam_params(payload: AdamPayload) -> AdamParams:
    """Raises Fatal naming the setting and its bounds."""
    values = vars(payload)
    decay = payload.learning_rate * payload.weight_decay
    for name, value in {**values, "learning_rate · weight_decay": decay}.items():
        top = 1.0 if name in ("beta1", "beta2") else LARGEST
        if not 0 <= value < top:
            raise Fatal(f"{name} is {value}; it must be at least 0 and below {top:g}")
    return AdamParams(**values)


def _width(payload: TrainPayload, name: str, row: Row) -> int:
    """Checks the shapes of what the row brings."""
    if TARGETS not in row.inputs:
        raise Fatal(f"row {name}: it has no {TARGETS}; position i of the input predicts target_tokens[i]")
    shape = row.inputs[TARGETS].shape
    if len(shape) != 1 and (len(shape) != 2 or payload.loss != WIDE_LOSS or shape[1] < 1):
        raise Fatal(
            f"row {name}: {TARGETS} has shape {list(shape)}; {payload.loss} takes "
            + ("[T] or [T, K]" if payload.loss == WIDE_LOSS else "[T], one target a position")
        )
    if shape[0] != len(row.tokens):
        raise Fatal(f"row {name}: {TARGETS} has length {shape[0]}, the input {len(row.tokens)}; they must be equal")
    for key, values in row.inputs.items():
        if values.shape != shape:
            raise Fatal(
                f"row {name}: {key} has shape {list(values.shape)}, {TARGETS} {list(shape)}; they must be equal"
            )
    return int(shape[1]) if len(shape) == 2 else 1


def _datum(name: str, row: Row, wide: int) -> Datum:
    ids = _ids(name, "the input", row.tokens)
    widened = {key: _widened(values, wide) for key, values in row.inputs.items()}
    targets = _ids(name, TARGETS, widened.pop(TARGETS))
    inputs = {key: _numbers(name, key, values) for key, values in widened.items()}
    return Datum(name, ids, targets, (True,) * len(ids), inputs, wide=wide)


def _widened(values: Array, wide: int) -> Array:
    """[T] or [T, K] → [T·wide], zeros behind each position's own."""
    flat = values.reshape(len(values), -1)
    return np.pad(flat, ((0, 0), (0, wide - flat.shape[1]))).reshape(-1)


def _kl_row(name: str, row: PayloadKlRow) -> KlRow:
    student = _ids(name, "student_input", row.student_input)
    reference = _ids(name, "reference_input", row.reference_input)
    targets, weights = _ids(name, TARGETS, row.target_tokens), _numbers(name, "weights", row.weights)
    for what, length in ((TARGETS, len(targets)), ("weights", len(weights))):
        if length != len(student):
            raise Fatal(f"row {name}: {what} has length {length}, student_input {len(student)}; they must be equal")
    mask = tuple(weight != 0.0 for weight in weights)
    if student and not any(mask):
        mask = (*mask[:-1], True)  # a row that weighs nothing has a loss of 0, and no pass is empty
    shift = len(reference) - len(student)
    for at in (at for at, taken in enumerate(mask) if taken):
        _check_aligned(name, student, reference, at, shift)
    masked = {at + shift for at, taken in enumerate(mask) if taken}
    return KlRow(name, student, mask, reference, tuple(at in masked for at in range(len(reference))), weights)


def _check_aligned(name: str, student: tuple[int, ...], reference: tuple[int, ...], at: int, shift: int) -> None:
    """What follows a weighed position is the same in both."""
    if at + shift < 0:
        raise Fatal(
            f"row {name}: position {at} has a weight, but reference_input is {-shift} tokens shorter than "
            "student_input and both must end alike"
        )
    if student[at + 1 : at + 2] != reference[at + shift + 1 : at + shift + 2]:
        raise Fatal(
            f"row {name}: after position {at} student_input goes on with {student[at + 1]}, reference_input with "
            f"{reference[at + shift + 1]}; both must end with the same tokens"
        )


def _ids(name: str, what: str, values: Array) -> tuple[int, ...]:
    _check_flat(name, what, values)
    if values.dtype.kind != "i":
        raise Fatal(f"row {name}: {what} is {values.dtype}; token ids are int64")
    return tuple(values.tolist())


def _numbers(name: str, what: str, values: Array) -> tuple[float, ...]:
    _check_flat(name, what, values)
    return tuple(values.astype(np.float64, copy=False).tolist())


def _check_flat(name: str, what: str, values: Array) -> None:
    if values.ndim != 1:
        raise Fatal(f"row {name}: {what} has shape {list(values.shape)}; it must be a list, one value a position")
