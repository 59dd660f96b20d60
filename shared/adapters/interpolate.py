"""Linear combinations of adapters, as what they do to the base: ΔW = Σ cᵢ·sᵢ·BᵢAᵢ, brought back to one rank.

Why not the factors one by one: A and B of an adapter are fixed only up to an invertible G, since (B·G⁻¹)(G·A) is the
same ΔW, so that a sum of As and a sum of Bs depends on how each was found; and it is not linear, since halving both
quarters ΔW. The combination itself has up to the sum of the ranks; of all matrices of the wanted rank its truncated
singular value decomposition is the nearest (Eckart and Young 1936), and how far off it is comes back with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.adapters.layout import Array, serving_name, split_serving_name

__all__ = ["Combined", "Source", "combine"]

Float64 = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Source:
    """`tensors` by serving name, fp32; `scaling` as its manifest's."""

    tensors: Mapping[str, Array]
    scaling: float
    coefficient: float


@dataclass(frozen=True)
class Combined:
    """`relative_error`: ‖Σ − result‖ / ‖Σ‖ in the Frobenius norm over all modules; 0 where nothing was cut off."""

    tensors: dict[str, Array]
    relative_error: float


def combine(sources: Sequence[Source], rank: int, scaling: float) -> Combined:
    """The adapter of `rank` whose `scaling`·B·A is nearest to Σ coefficient·scaling·B·A of `sources`.

    A [rank, in] has orthonormal rows and B [out, rank] the rest, so that directions of weight 0 can still be trained.
    One source with coefficient 1 comes out as it is, to the byte. Raises ValueError for sources that differ in their
    modules, and for sums that fp32 cannot hold."""
    used = [source for source in sources if source.coefficient != 0]
    if len(used) == 1 and used[0].coefficient == 1 and used[0].scaling == scaling:
        return Combined(dict(used[0].tensors), 0.0)
    modules = _modules(sources)
    tensors: dict[str, Array] = {}
    cut = whole = 0.0
    for module in modules:
        first, second, lost, size = _nearest(module, sources, rank, scaling)
        tensors[serving_name(module, "lora_A")], tensors[serving_name(module, "lora_B")] = first, second
        cut, whole = cut + lost, whole + size
    if not np.isfinite(whole) or not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        raise ValueError("the combination has values that float32 cannot hold; use smaller coefficients")
    return Combined(tensors, float(np.sqrt(cut / whole)) if whole else 0.0)


def _modules(sources: Sequence[Source]) -> list[str]:
    named = [{split[0] for split in map(split_serving_name, s.tensors) if split is not None} for s in sources]
    for number, modules in enumerate(named):
        if modules != named[0]:
            differing = sorted(modules ^ named[0])[0]
            raise ValueError(f"source {number + 1} and source 1 differ in their modules, first at {differing!r}")
    return sorted(named[0])


def _nearest(module: str, sources: Sequence[Source], rank: int, scaling: float) -> tuple[Array, Array, float, float]:
    """(A, B, squared norm cut off, squared norm in all), by the QR factors of both sides: K × K is all that is
    decomposed, where K is the sum of the ranks."""
    with np.errstate(over="ignore", invalid="ignore"):
        left, right = _stacked(module, sources)
        if not (np.isfinite(left).all() and np.isfinite(right).all()):
            return right[:rank].astype(np.float32), left[:, :rank].astype(np.float32), 0.0, float("inf")
        left_q, left_r = np.linalg.qr(left)
        right_q, right_r = np.linalg.qr(right.T)
        u, singular, vt = np.linalg.svd(left_r @ right_r.T)
        kept = min(rank, len(singular))
        first = np.zeros((rank, right.shape[1]))
        second = np.zeros((left.shape[0], rank))
        first[:kept] = vt[:kept] @ right_q.T
        second[:, :kept] = (left_q @ u[:, :kept]) * (singular[:kept] / scaling)
        squares = singular**2
        return (
            first.astype(np.float32),
            second.astype(np.float32),
            float(squares[kept:].sum()),
            float(squares.sum()),
        )


def _stacked(module: str, sources: Sequence[Source]) -> tuple[Float64, Float64]:
    """[out, K] and [K, in] whose product is the combination."""
    seconds = [s.tensors[serving_name(module, "lora_B")] * np.float64(s.coefficient * s.scaling) for s in sources]
    firsts = [np.asarray(s.tensors[serving_name(module, "lora_A")], np.float64) for s in sources]
    return np.concatenate(seconds, axis=1), np.concatenate(firsts, axis=0)
