"""Data of a forward or forward_backward, whatever wire they came over, as the rows of a payload.

In: tokens and named tensors. Out: a `TrainPayload`. Rules: position i predicts `target_tokens[i]`; there are at most as
many targets as inputs, and inputs behind the last target, which no target sees, are dropped; every input of a loss has
the targets' shape; cross_entropy without weights has weight 1 everywhere. Invariant: one content gives one payload, and
so one digest, in JSON and in protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.gateway.tinker.errors import invalid
from services.gateway.tinker.losses import INPUT_DTYPES, LossSpec, check_inputs, loss_spec, settings_of
from services.gateway.tinker.tensors import Budget, RawTensor, dense, token_ids
from shared.operations.payload import Array, Row, TrainPayload

__all__ = ["RawDatum", "train_payload"]


@dataclass(frozen=True)
class RawDatum:
    tokens: Array
    inputs: Mapping[str, RawTensor]


def train_payload(data: Iterable[RawDatum], loss: Any, config: Mapping[str, Any], max_elements: int) -> TrainPayload:
    """Raises Refused, naming the place, for anything that is not allowed."""
    spec = loss_spec(loss)
    settings = settings_of(loss, spec, config)
    budget = Budget(max_elements)
    rows = tuple(_row(datum, f"data[{index}]", loss, spec, budget) for index, datum in enumerate(data))
    if not rows:
        raise invalid("data: there is none; send at least one datum")
    return TrainPayload(rows=rows, loss=loss, config=settings)


def _row(datum: RawDatum, where: str, loss: str, spec: LossSpec, budget: Budget) -> Row:
    tokens = token_ids(datum.tokens, f"{where}.model_input")
    if not tokens.size:
        raise invalid(f"{where}.model_input: there is no token")
    budget.take(tokens.size, where)
    check_inputs(loss, spec, datum.inputs, where)
    arrays = {name: _input(name, raw, f"{where}.loss_fn_inputs.{name}", budget) for name, raw in datum.inputs.items()}
    targets = token_ids(arrays["target_tokens"], f"{where}.loss_fn_inputs.target_tokens")
    _check_targets(targets, tokens, where, loss, spec)
    if loss == "cross_entropy" and "weights" not in arrays:
        arrays["weights"] = np.ones(targets.shape, np.float32)
    for name, array in arrays.items():
        if array.shape != targets.shape:
            raise invalid(
                f"{where}.loss_fn_inputs.{name}: its shape is {list(array.shape)}, "
                f"that of target_tokens {list(targets.shape)}; they must be equal"
            )
    return Row(tokens=tokens[: len(targets)], inputs=arrays)


def _input(name: str, raw: RawTensor, where: str, budget: Budget) -> Array:
    wanted = INPUT_DTYPES[name]
    if raw.dtype != wanted:
        raise invalid(f"{where}: its dtype is {raw.dtype}; it must be {wanted}")
    return dense(raw, where, budget)


def _check_targets(targets: Array, tokens: Array, where: str, loss: str, spec: LossSpec) -> None:
    if targets.ndim != 1 and not spec.wide:
        raise invalid(f"{where}: {loss} takes one target a position; target_tokens has {targets.ndim} dimensions")
    if not targets.size:
        raise invalid(f"{where}: target_tokens is empty; there must be at least one target")
    if len(targets) > len(tokens):
        raise invalid(
            f"{where}: {len(targets)} targets are more than {len(tokens)} input tokens; "
            "position i of the input predicts target i"
        )
