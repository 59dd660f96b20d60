"""From a task's item to the token ids that are sampled after."""

from __future__ import annotations

from shared.bases import Base
from shared.errors import Fatal
from shared.tasks.taskset import TaskItem
from shared.text import TextCodec

__all__ = ["prompt_ids"]


def prompt_ids(item: TaskItem, codec: TextCodec, base: Base, max_tokens: int) -> tuple[int, ...]:
    """The item's chat up to the assistant's turn. Raises Fatal naming the item when the template refuses
    it, or when it leaves no room for `max_tokens` in the base model's context."""
    try:
        ids = tuple(codec.chat_ids(item.messages))
    except ValueError as error:
        raise Fatal(f"prompt {item.id} cannot be sampled: {error}") from error
    if len(ids) + max_tokens > base.max_context:
        raise Fatal(
            f"prompt {item.id} has {len(ids)} tokens; with {max_tokens} new ones that is more than "
            f"the {base.max_context} that {base.name} takes"
        )
    return ids
