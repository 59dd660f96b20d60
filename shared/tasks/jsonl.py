"""A tenant's chats to learn from and prompts with answers. Every complaint names the line."""

from __future__ import annotations

import hashlib
import json

from shared.tasks.chat import Chat, Messages
from shared.tasks.lines import json_kind, json_lines, messages_of
from shared.tasks.taskset import TaskItem

__all__ = ["is_held_out", "parse_messages_jsonl", "parse_prompts_jsonl", "prompt_of"]


def parse_messages_jsonl(data: bytes, train_on: str = "assistant") -> list[Chat]:
    """`{"messages": [{"role", "content", "weight"?}, …]}` a line; the chat's name is `line-N`.

    Raises ValueError naming the first bad line; a line on which `train_on` (see `Sft`) leaves nothing to
    learn is bad."""
    chats = []
    for number, line in json_lines(data):
        chat = Chat(messages_of(number, "messages", line.get("messages"), weights=True), f"line-{number}")
        problem = _nothing_to_learn(chat, train_on)
        if problem:
            raise ValueError(f"line {number}: {problem}, so there is nothing to learn from")
        chats.append(chat)
    return chats


def parse_prompts_jsonl(data: bytes) -> list[TaskItem]:
    """`{"prompt": text or [{"role", "content"}, …], "answer": text}` a line; the item's id is `line-N`.
    Raises ValueError naming the first bad line."""
    items = []
    for number, line in json_lines(data):
        prompt, answer = prompt_of(number, line.get("prompt")), line.get("answer")
        if not isinstance(answer, str):
            raise ValueError(f"line {number}: `answer` must be a text, found {json_kind(answer)}")
        items.append(TaskItem(f"line-{number}", prompt, answer))
    return items


def prompt_of(number: int, prompt: object) -> Messages:
    """The messages before the assistant's turn. Raises ValueError."""
    if isinstance(prompt, str) and prompt:
        return ({"role": "user", "content": prompt},)
    messages = messages_of(number, "prompt", prompt)
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"line {number}: the prompt ends with the assistant; its turn is what is sampled")
    return messages


def is_held_out(item: TaskItem, share: float) -> bool:
    """By hash of the prompt alone, so that copies of a prompt fall on the same side in any file."""
    prompt = json.dumps(item.messages, sort_keys=True, separators=(",", ":"))
    return int(hashlib.sha256(prompt.encode()).hexdigest()[:12], 16) < share * 16**12


def _nothing_to_learn(chat: Chat, train_on: str) -> str | None:
    match train_on:
        case "last":
            role = chat[-1]["role"]
            return None if role == "assistant" else f"train_on is last, but the last message is the {role}'s"
        case "chosen":
            chosen = any(message.get("weight") == 1 for message in chat)
            return None if chosen else "train_on is chosen, but no message has the weight 1"
        case _:
            said = [message for message in chat if message["role"] == "assistant"]
            if not said:
                return "no message has the role assistant"
            return (
                None if any(m.get("weight") != 0 for m in said) else "every message of the assistant has the weight 0"
            )
