"""What the training primitives eat: one row of token ids with what its loss needs.

Invariant: a batch that reaches the base model is whole;
every row fits the context, every id is in the vocabulary, every array has the row's length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shared.errors import Fatal


@dataclass(frozen=True, slots=True)
class Datum:
    """One row of length L. `targets[i]` is what position i predicts (already shifted).

    `mask[i]`: position i takes part; elsewhere the logprob comes back as 0.0. `inputs` are the loss's
    own arrays of length L (`losses.py` says which), ignored outside the mask. `coefficients` weigh each
    position's loss and are fixed from the whole step; `name` says in errors which row it was. Two rows with
    the same non-empty `pair` are one pair, the chosen one first; they are never in different micro-batches.
    With `wide` K > 1 each position has K targets, one after another: targets, inputs, coefficients and the
    logprobs that come back have length L·K.
    """

    name: str
    input_ids: tuple[int, ...]
    targets: tuple[int, ...]
    mask: tuple[bool, ...]
    inputs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    coefficients: tuple[float, ...] | None = None
    pair: str = ""
    wide: int = 1

    def with_input(self, name: str, values: Sequence[float]) -> Datum:
        """The same row with one more (or another) input."""
        return replace(self, inputs={**self.inputs, name: tuple(values)})

    @property
    def weighed(self) -> int:
        """How many positions take part."""
        return sum(self.mask)

    @property
    def target_mask(self) -> tuple[bool, ...]:
        """Which targets take part, [L·K]."""
        return self.mask if self.wide == 1 else tuple(taken for taken in self.mask for _ in range(self.wide))


def check_datums(data: Sequence[Datum], needs: frozenset[str], vocab_size: int, max_context: int) -> None:
    """Raises Fatal naming the row and the reason."""
    if not data:
        raise Fatal("the batch is empty; a step needs at least one row")
    given = data[0].inputs.keys()
    for datum in data:
        if datum.inputs.keys() != given:
            raise Fatal(f"row {datum.name}: its inputs are {sorted(datum.inputs)}, the first row's {sorted(given)}")
        if datum.wide != data[0].wide:
            raise Fatal(f"row {datum.name}: {datum.wide} targets a position, the first row has {data[0].wide}")
        reason = _fault(datum, needs, vocab_size, max_context)
        if reason:
            raise Fatal(f"row {datum.name}: {reason}")


def _fault(datum: Datum, needs: frozenset[str], vocab_size: int, max_context: int) -> str | None:
    length = len(datum.input_ids)
    if not 0 < length <= max_context:
        return f"{length} tokens; a row has 1 to {max_context} (the base's context)"
    arrays = {"targets": datum.targets, "mask": datum.mask, **datum.inputs}
    if datum.coefficients is not None:
        arrays["coefficients"] = datum.coefficients
    missing = needs - arrays.keys()
    if missing:
        return f"the loss needs {', '.join(sorted(missing))}"
    for name, values in arrays.items():
        wanted = length if name == "mask" else length * datum.wide
        if len(values) != wanted:
            return f"{name} has length {len(values)}, the row {wanted}"
        if not all(math.isfinite(value) for value in values):
            return f"{name} holds a number that is not finite"
    if not any(datum.mask):
        return "no position of it takes part in the loss"
    outside = next((t for t in (*datum.input_ids, *datum.targets) if not 0 <= t < vocab_size), None)
    return None if outside is None else f"token id {outside} is outside the vocabulary of {vocab_size}"


def units(data: Sequence[Datum]) -> list[list[int]]:
    """Indices of `data` that must stay together: pairs, and every other row by itself; longest first, the
    order a function of the lengths alone. Raises Fatal for a pair that is not two rows."""
    together: dict[str, list[int]] = {}
    for index, datum in enumerate(data):
        together.setdefault((datum.pair and f"pair {datum.pair}") or f"row {index}", []).append(index)
    for name, members in together.items():
        if len(members) != (2 if name.startswith("pair ") else 1):
            raise Fatal(f"{name} has {len(members)} rows; a pair is a chosen and a rejected one")
    return sorted(together.values(), key=lambda members: -max(len(data[i].input_ids) for i in members))


def cost(rows: Sequence[Datum], padded: bool) -> int:
    """Tokens that a forward pass over `rows` computes."""
    lengths = [len(row.input_ids) for row in rows]
    return max(lengths) * len(lengths) if padded else sum(lengths)
