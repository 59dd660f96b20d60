"""DPO as rows: pairs of answers in, two datums a pair out.

Invariant: a pair is whole (both rows, completions with at least one token) or takes no part at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import compress

from services.learner.datum import Datum
from services.learner.order import step_positions
from services.learner.recipe import StepRows
from services.learner.trainer import LossCall
from shared.errors import Fatal
from shared.tasks import Pair
from shared.text.codec import TextCodec


def step_pairs(pairs: Sequence[Pair], seed: int, step: int, batch_size: int) -> list[Pair]:
    """The pairs of step `step` (1-based). Raises Fatal without pairs."""
    return [pairs[i] for i in step_positions(len(pairs), "dpo", seed, step, batch_size)]


def dpo_rows(pairs: Sequence[Pair], codec: TextCodec, max_length: int, beta: float) -> StepRows:
    """Prompt + chosen and prompt + rejected of each pair; Σ c·ℓ is the mean over the pairs (arXiv:2305.18290).

    The tokens of the completion weigh, with the one that ends it. A row is cut to its first `max_length`
    tokens; a pair that then has a row without a token of its completion takes no part, and
    `truncated_rows` counts the rows that were cut. Raises Fatal naming a pair that is none."""
    encoded = [
        (f"{position}|{pair.name}", pair.name, [_encode(pair, side, codec) for side in ("chosen", "rejected")])
        for position, pair in enumerate(pairs)
    ]
    truncated = sum(len(ids) > max_length for _, _, sides in encoded for ids, _ in sides)
    kept = [entry for entry in encoded if all(any(mask[1:max_length]) for _, mask in entry[2])]
    data = [
        _datum(f"{name}, {side}", ids[:max_length], mask[:max_length], key, 1.0 / len(kept))
        for key, name, sides in kept
        for side, (ids, mask) in zip(("chosen", "rejected"), sides, strict=True)
    ]
    call = LossCall("dpo", {"beta": beta})
    metrics = {"truncated_rows": float(truncated), "pairs": float(len(kept))}
    return StepRows(data, call, metrics, reference=True, report=partial(_report, beta))


def _encode(pair: Pair, side: str, codec: TextCodec) -> tuple[list[int], list[bool]]:
    chat = pair.chosen_chat if side == "chosen" else pair.rejected_chat
    try:
        ids, mask = codec.conversation(chat, "chosen")
    except ValueError as error:
        raise Fatal(f"row {pair.name}, {side}: {error}") from error
    return ids, mask


def _datum(name: str, ids: list[int], mask: list[bool], pair: str, weight: float) -> Datum:
    taken = tuple(mask[1:])
    return Datum(
        name=name,
        input_ids=tuple(ids[:-1]),
        targets=tuple(ids[1:]),
        mask=taken,
        coefficients=tuple(weight if kept else 0.0 for kept in taken),
        pair=pair,
    )


def _report(beta: float, rows: Sequence[Datum], logprobs: Sequence[Sequence[float]]) -> dict[str, float]:
    """With Δ = Σ(lp − ref) of a row: `margin` mean of Δ_chosen − Δ_rejected, `accuracy` the share of pairs
    where that is above 0, the implicit rewards β·Δ of either side (arXiv:2305.18290, §4)."""
    distances: dict[str, list[float]] = {}
    for datum, row in zip(rows, logprobs, strict=True):
        moved = (lp - ref for lp, ref in zip(row, datum.inputs["ref_logprobs"], strict=True))
        distances.setdefault(datum.pair, []).append(math.fsum(compress(moved, datum.mask)))
    count = len(distances)
    margins = [chosen - rejected for chosen, rejected in distances.values()]
    return {
        "margin": math.fsum(margins) / count,
        "accuracy": sum(margin > 0 for margin in margins) / count,
        "chosen_reward": beta * math.fsum(chosen for chosen, _ in distances.values()) / count,
        "rejected_reward": beta * math.fsum(rejected for _, rejected in distances.values()) / count,
    }
