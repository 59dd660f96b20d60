"""Tensors of the wire as dense arrays, checked on the way: dtype, shape, length, finite values.

In: a `RawTensor`, whose values JSON and protobuf decode alike. Out: int64 or float32, C-contiguous. Invariant: an array
has exactly the shape that was said, and what sparse tensors unfold to is counted before it is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from services.gateway.tinker.errors import invalid
from shared.errors import Refused
from shared.operations.payload import Array

__all__ = [
    "MAX_DIMENSIONS",
    "NUMPY",
    "Budget",
    "Csr",
    "Dtype",
    "RawTensor",
    "dense",
    "integers",
    "numbers",
    "token_ids",
]

Dtype = Literal["int64", "float32"]
NUMPY: dict[Dtype, np.dtype[Any]] = {"int64": np.dtype("<i8"), "float32": np.dtype("<f4")}
MAX_DIMENSIONS = 2
TOKEN_END = 1 << 31
_TYPES: dict[Dtype, set[type]] = {"int64": {int}, "float32": {int, float}}


@dataclass(frozen=True)
class Csr:
    """Row pointers (rows + 1) and column indices (one a value), int64."""

    crow: Array
    columns: Array


@dataclass(frozen=True)
class RawTensor:
    """`values` flat, in the dtype; `shape` None: as many as there are values, in one dimension."""

    dtype: Dtype
    values: Array
    shape: tuple[int, ...] | None = None
    csr: Csr | None = None


class Budget:
    """How many elements a request may still unfold to."""

    def __init__(self, elements: int) -> None:
        self._bound = self._left = elements

    def take(self, elements: int, where: str) -> None:
        self._left -= elements
        if self._left < 0:
            raise Refused(
                f"{where}: the request has more than {self._bound} numbers in all; send fewer data at a time",
                "too_large",
                status=413,
            )


def dense(raw: RawTensor, where: str, budget: Budget) -> Array:
    """Raises Refused, naming `where`, for what does not fit together or is not finite."""
    shape = raw.shape if raw.shape is not None else (raw.values.size,)
    if len(shape) > MAX_DIMENSIONS or not shape or any(size < 0 for size in shape):
        raise invalid(f"{where}: shape {_shown(shape)} is not allowed; one or two dimensions are")
    if raw.csr is not None:
        array = _unfolded(raw, raw.csr, shape, where, budget)
    else:
        if math.prod(shape) != raw.values.size:
            raise invalid(f"{where}: shape {_shown(shape)} needs {math.prod(shape)} values, {raw.values.size} came")
        budget.take(raw.values.size, where)
        array = raw.values.reshape(shape)
    if raw.dtype == "float32" and not np.isfinite(array).all():
        raise invalid(f"{where}: every value must be finite; NaN or an infinity came")
    return np.ascontiguousarray(array)


def token_ids(values: Array, where: str) -> Array:
    """Raises Refused for what no vocabulary has."""
    if values.size and (values.min() < 0 or values.max() >= TOKEN_END):
        wrong = values[(values < 0) | (values >= TOKEN_END)].flat[0]
        raise invalid(f"{where}: {int(wrong)} is no token id; they are 0 to {TOKEN_END - 1}")
    return values


def integers(values: Sequence[Any], where: str) -> Array:
    """A JSON list of whole numbers, as int64."""
    return numbers(values, "int64", where)


def numbers(values: Sequence[Any], dtype: Dtype, where: str) -> Array:
    """A flat JSON list of numbers. Raises Refused for anything else in it."""
    # Types first: of one long text among many short ones numpy would make an array of long texts.
    if not set(map(type, values)) <= _TYPES[dtype]:
        raise invalid(f"{where}: a flat list of {'whole numbers' if dtype == 'int64' else 'numbers'} is needed")
    try:
        found = np.array(values) if len(values) else np.empty(0, NUMPY[dtype])
    except OverflowError as error:
        raise invalid(f"{where}: a number is too large") from error
    if found.size and found.dtype.kind not in ("i" if dtype == "int64" else "if"):
        raise invalid(f"{where}: a number is too large; 64 bits are read")
    with np.errstate(over="ignore"):
        # What float32 cannot hold becomes infinite, and is refused as such.
        return found.astype(NUMPY[dtype], copy=False)


def _unfolded(raw: RawTensor, csr: Csr, shape: tuple[int, ...], where: str, budget: Budget) -> Array:
    if raw.shape is None or len(shape) != 2:
        raise invalid(f"{where}: a sparse tensor needs its shape, of two dimensions")
    rows, width = shape
    count = raw.values.size
    budget.take(max(rows * width, count), where)
    crow, columns = csr.crow, csr.columns
    if crow.size != rows + 1 or columns.size != count:
        raise invalid(
            f"{where}: {rows} rows and {count} values need {rows + 1} row pointers and {count} column indices; "
            f"{crow.size} and {columns.size} came"
        )
    # Bounded before they are subtracted: differences of larger ones wrap around to lengths that look right.
    within = ((crow >= 0) & (crow <= count)).all()
    lengths = np.diff(crow) if within else crow
    if not within or crow[0] != 0 or crow[-1] != count or (lengths < 0).any():
        raise invalid(f"{where}: row pointers must rise from 0 to the number of values, {count}")
    if count and (columns.min() < 0 or columns.max() >= width):
        raise invalid(f"{where}: column indices must be from 0 to {width - 1}")
    places = np.repeat(np.arange(rows, dtype=np.int64), lengths) * width + columns
    if np.unique(places).size != count:
        raise invalid(f"{where}: a cell is given twice")
    flat = np.zeros(rows * width, NUMPY[raw.dtype])
    flat[places] = raw.values
    return flat.reshape(shape)


def _shown(shape: Sequence[int]) -> str:
    return f"[{', '.join(str(size) for size in shape[:8])}{', …' if len(shape) > 8 else ''}]"
