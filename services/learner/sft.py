"""SFT as rows: chats in, datums with the loss on the turns that are to be learnt out.

Invariant: a step's loss is the mean over the tokens that it trains on, whatever rows they stand in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from typing import Literal

from services.learner.datum import Datum
from services.learner.order import step_positions
from services.learner.recipe import StepRows
from services.learner.trainer import LossCall
from shared.errors import Fatal
from shared.tasks.taskset import Chat
from shared.text.codec import TextCodec

CALL = LossCall("cross_entropy")

TrainOn = Literal["assistant", "last", "chosen"]


def step_chats(chats: Sequence[Chat], seed: int, step: int, batch_size: int) -> list[tuple[str, Chat]]:
    """The chats of step `step` (1-based) with their names. Raises Fatal without chats."""
    positions = step_positions(len(chats), "sft", seed, step, batch_size)
    return [(chats[i].name or f"chat-{i + 1}", chats[i]) for i in positions]


def sft_rows(
    chats: Sequence[tuple[str, Chat]], codec: TextCodec, max_length: int, train_on: TrainOn = "assistant"
) -> StepRows:
    """Loss Σ −w·lp / Σw over the step, w = 1 on the tokens of the turns that `train_on` names.

    A chat is cut to its first `max_length` tokens; one that then has nothing left to learn takes no part,
    and `truncated_rows` counts those that were cut. Raises Fatal naming a chat that is none."""
    encoded = [_encode(name, chat, codec, train_on) for name, chat in chats]
    cut = [(name, ids[:max_length], mask[:max_length]) for name, ids, mask in encoded]
    total = sum(sum(mask[1:]) for _, _, mask in cut)
    data = [_datum(name, ids, mask, total) for name, ids, mask in cut if any(mask[1:])]
    truncated = sum(len(ids) > max_length for _, ids, _ in encoded)
    return StepRows(data, CALL, {"rows": float(len(data)), "truncated_rows": float(truncated)}, report=_report)


def _encode(name: str, chat: Chat, codec: TextCodec, train_on: TrainOn) -> tuple[str, list[int], list[bool]]:
    try:
        ids, mask = codec.conversation(chat, train_on)
    except ValueError as error:
        raise Fatal(f"row {name}: {error}") from error
    return name, ids, mask


def _datum(name: str, ids: list[int], mask: list[bool], total: int) -> Datum:
    taken = tuple(mask[1:])
    weights = tuple(float(t) for t in taken)
    return Datum(
        name=name,
        input_ids=tuple(ids[:-1]),
        targets=tuple(ids[1:]),
        mask=taken,
        inputs={"weights": weights},
        coefficients=tuple(weight / total for weight in weights),
    )


def _report(rows: Sequence[Datum], logprobs: Sequence[Sequence[float]]) -> dict[str, float]:
    """`nll`: the mean of −lp over the trained tokens, in nats."""
    trained = [lp for datum, row in zip(rows, logprobs, strict=True) for lp in compress(row, datum.mask)]
    return {"nll": -math.fsum(trained) / len(trained)}
