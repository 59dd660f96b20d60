"""Preferences: one prompt, what is wanted after it and what is not. Every complaint names the line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared.tasks.chat import Chat, Messages
from shared.tasks.jsonl import prompt_of
from shared.tasks.lines import json_lines, messages_of

__all__ = ["Pair", "parse_pairs_jsonl"]


@dataclass(frozen=True)
class Pair:
    """`name` is for people: `line-12` of a file. Both completions begin and end with the assistant."""

    name: str
    prompt: Messages
    chosen: Messages
    rejected: Messages

    @property
    def chosen_chat(self) -> Chat:
        """The whole chat, with weight 1 on what the assistant says after the prompt and 0 on all else:
        `TextCodec.conversation(chat, "chosen")` marks the completion's tokens."""
        return self._chat(self.chosen, "chosen")

    @property
    def rejected_chat(self) -> Chat:
        """As `chosen_chat`."""
        return self._chat(self.rejected, "rejected")

    def _chat(self, completion: Messages, side: str) -> Chat:
        before = ({**message, "weight": 0} for message in self.prompt)
        after = ({**message, "weight": int(message["role"] == "assistant")} for message in completion)
        return Chat((*before, *after), f"{self.name}.{side}")


def parse_pairs_jsonl(data: bytes) -> list[Pair]:
    """`{"prompt", "chosen", "rejected"}` a line: a text or messages each. Raises ValueError naming the
    first bad line; equal completions are bad, since their difference teaches nothing."""
    pairs = []
    for number, line in json_lines(data):
        prompt = prompt_of(number, line.get("prompt"))
        chosen, rejected = (_completion(number, side, line.get(side)) for side in ("chosen", "rejected"))
        if chosen == rejected:
            raise ValueError(f"line {number}: `chosen` and `rejected` are equal, so that there is no preference")
        pairs.append(Pair(f"line-{number}", prompt, chosen, rejected))
    return pairs


def _completion(number: int, side: str, value: Any) -> Messages:
    if isinstance(value, str) and value.strip():
        return ({"role": "assistant", "content": value},)
    messages = messages_of(number, side, value.strip() if isinstance(value, str) else value)
    for place, name in ((0, "begins"), (-1, "ends")):
        role = messages[place]["role"]
        if role != "assistant":
            raise ValueError(f"line {number}: `{side}` {name} with the {role}; a completion is the assistant's")
    if not any(message["content"].strip() for message in messages if message["role"] == "assistant"):
        raise ValueError(f"line {number}: in `{side}` the assistant says nothing")
    return messages
