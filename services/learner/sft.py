"""SFT as rows: chats in, datums with the loss on what the assistant says out.

Invariant: the rows of a step are a function of (data, seed, step) alone, and every row is seen once
before any is seen twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.learner.datum import Datum
from services.learner.recipe import StepRows
from services.learner.trainer import LossCall
from shared.errors import Fatal
from shared.tasks.permutation import Permutation
from shared.tasks.taskset import Chat
from shared.text.codec import TextCodec

CALL = LossCall("cross_entropy")


def step_chats(chats: Sequence[Chat], seed: int, step: int, batch_size: int) -> list[tuple[str, Chat]]:
    """The named chats of step `step` (1-based): the next `batch_size` of an endless sequence of epochs,
    each shuffled anew. Raises Fatal without chats."""
    if not chats:
        raise Fatal("the training data has no chats")
    picked = []
    for position in range((step - 1) * batch_size, step * batch_size):
        epoch, at = divmod(position, len(chats))
        index = Permutation(len(chats), f"sft|{seed}|{epoch}")[at]
        picked.append((f"chat-{index + 1}", chats[index]))
    return picked


def sft_rows(chats: Sequence[tuple[str, Chat]], codec: TextCodec, max_length: int) -> StepRows:
    """Loss Σ −w·lp / Σw over the step, w = 1 on the assistant's tokens (its turns and what ends them).

    A chat is cut to `max_length` tokens; one that then has no assistant token left takes no part, and
    `truncated_rows` counts those that were cut. Raises Fatal naming a chat that is none."""
    encoded = [_encode(name, chat, codec) for name, chat in chats]
    cut = [(name, ids[:max_length], mask[:max_length]) for name, ids, mask in encoded]
    total = sum(sum(mask[1:]) for _, _, mask in cut)
    data = [_datum(name, ids, mask, total) for name, ids, mask in cut if any(mask[1:])]
    truncated = sum(len(ids) > max_length for _, ids, _ in encoded)
    return StepRows(data, CALL, {"rows": float(len(data)), "truncated_rows": float(truncated)})


def _encode(name: str, chat: Chat, codec: TextCodec) -> tuple[str, list[int], list[bool]]:
    try:
        ids, mask = codec.conversation(chat)
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
