"""Which turns of a chat are learnt, and where in its rendered text they stand.

In: a chat, some of whose messages may have a `weight` of 0 or 1. Out: places of messages; character ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from shared.text.template import ChatTemplate, Message

__all__ = ["TrainOn", "learnt_turns", "turn_span"]

TrainOn = Literal["assistant", "last", "chosen"]


def learnt_turns(messages: Sequence[Message], train_on: TrainOn) -> list[int]:
    """Places of the turns that `train_on` names (`TextCodec.conversation`), at least one; else ValueError."""
    match train_on:
        case "assistant":
            said = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
            if not said:
                raise ValueError("the chat has no assistant turn to learn from")
            turns = [i for i in said if messages[i].get("weight") != 0]
            if not turns:
                raise ValueError("every assistant turn of the chat has weight 0; nothing is left to learn from")
        case "last":
            if not messages or messages[-1].get("role") != "assistant":
                raise ValueError("the chat's last turn is not the assistant's; there is nothing to learn from")
            turns = [len(messages) - 1]
        case "chosen":
            turns = [i for i, message in enumerate(messages) if message.get("weight") == 1]
            if not turns:
                raise ValueError("no turn of the chat has weight 1; nothing was chosen to learn from")
        case _:
            raise ValueError(f"train_on is {train_on!r}; allowed are assistant, last, chosen")
    return turns


def turn_span(template: ChatTemplate, messages: Sequence[Message], turn: int, text: str) -> tuple[int, int]:
    """From where the turn's speaker begins to the end of the rendered turn, in `text`, the rendered chat.

    Raises ValueError when the template renders the turn differently once others follow it."""
    through = template.render(messages[: turn + 1], False)
    before = _prompt(template, messages, turn)
    if not (through.startswith(before) and text.startswith(through)):
        raise ValueError("the chat template rewrites earlier turns; split the chat into one per answer")
    return len(before), len(through)


def _prompt(template: ChatTemplate, messages: Sequence[Message], turn: int) -> str:
    """The text up to the turn's first own character."""
    if messages[turn].get("role") == "assistant":
        return template.render(messages[:turn], True) if turn else ""
    # There is no generation prompt for others: what two different contents have in common is the template's.
    one, other = (template.render([*messages[:turn], {**messages[turn], "content": c}], False) for c in ("a", "b"))
    alike = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
    return one[:alike]
