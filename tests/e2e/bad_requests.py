"""Requests that cannot run, each with the words that its refusal must hold: what is wrong, what is allowed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.tiny import TINY_NAME

Refs = dict[str, dict[str, Any]]
"""Uploaded files by name: `chats` and `prompts`; `broken`, whose third line is no JSON, and
`broken prompts`, whose fifth is none."""

POLICY = "bad/input"
SUMS: dict[str, Any] = {"kind": "arithmetic"}
INFINITE = "<1e999>"
"""Stands for a number that only JSON text can hold; see `text_of`."""


def sft(method: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    data = {"kind": "task", "task": SUMS}
    whole = {"kind": "sft", "steps": 1, "batch_size": 2, "data": data, **(method or {})}
    return {"policy": POLICY, "base": TINY_NAME, "method": whole, **changes}


def grpo(**method: Any) -> dict[str, Any]:
    whole = {"kind": "grpo", "steps": 1, "task": SUMS, "prompts_per_step": 2, "group_size": 2, "max_tokens": 4}
    return {"policy": POLICY, "base": TINY_NAME, "method": {**whole, **method}}


def rate(value: Any) -> dict[str, Any]:
    return sft({"optimizer": {"learning_rate": value}})


def jsonl(ref: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return sft({"data": {"kind": "jsonl", "data": {**ref, **changes}}})


def text_of(body: dict[str, Any]) -> str:
    return json.dumps(body).replace(f'"{INFINITE}"', "1e999")


BAD: dict[str, tuple[Callable[[Refs], dict[str, Any]], tuple[str, ...]]] = {
    "unknown base": (lambda _: sft(base="tiny/lama"), ("base", "tiny/lama", f"did you mean {TINY_NAME}", "known are")),
    "unknown method": (lambda _: sft({"kind": "ppo"}), ("method", "ppo", "'sft', 'grpo'")),
    "unknown task": (lambda _: grpo(task={"kind": "chess"}), ("task", "chess", "'arithmetic', 'jsonl'")),
    "unknown module": (
        lambda _: sft(lora={"target_modules": ["q_proj", "lm_head"]}),
        ("lora.target_modules", "lm_head", "allowed are q_proj"),
    ),
    "rank of no engine": (lambda _: sft(lora={"rank": 33}), ("lora.rank", "33", "maximum of 32")),
    "rank of no contract": (lambda _: sft(lora={"rank": 1000}), ("lora.rank", "less than or equal to 512")),
    "rank 0": (lambda _: sft(lora={"rank": 0}), ("lora.rank", "greater than or equal to 1")),
    "unknown parent": (lambda _: sft(parent="bad/input@7"), ("parent bad/input@7 does not exist", "mint revisions")),
    "parent of another tenant": (lambda _: sft(parent="other/x@1"), ("belongs to tenant other", "its own tenant only")),
    "no steps": (lambda _: sft({"steps": 0}), ("steps", "greater than or equal to 1")),
    "group of none": (lambda _: grpo(group_size=0), ("group_size", "greater than or equal to 2")),
    "learning rate NaN": (lambda _: rate(float("nan")), ("learning_rate", "finite number")),
    "learning rate 1e999": (lambda _: rate(INFINITE), ("learning_rate", "finite number")),
    "learning rate of words": (lambda _: rate("fast"), ("learning_rate", "valid number")),
    "name with ../": (
        lambda _: sft(policy="bad/../x"),
        ("is not a reference", "each part is 1 to 63 of a-z"),
    ),
    "name in capitals": (lambda _: sft(policy="Bad/Input"), ("policy", "each part is 1 to 63 of a-z")),
    "name of 300": (lambda _: sft(policy="bad/" + "x" * 300), ("policy", "each part is 1 to 63 of a-z")),
    "name like a base's": (lambda _: sft(policy="tiny/mine"), ("'tiny'", "choose another tenant")),
    "unknown field": (lambda _: sft(colour="red"), ("colour", "no such field")),
    "missing field": (lambda _: {"policy": POLICY, "base": TINY_NAME}, ("method", "is required")),
    "data missing": (
        lambda refs: jsonl(refs["chats"], key="data/bad/nothing"),
        ("there is no data at data/bad/nothing", "mint data put"),
    ),
    "data of another tenant": (lambda refs: jsonl(refs["chats"], key="data/other/x"), ("is no data of tenant bad",)),
    "data with another sha256": (lambda refs: jsonl(refs["chats"], sha256="0" * 64), ("has another sha256",)),
    "data with another size": (lambda refs: jsonl(refs["chats"], size=3), ("the reference says 3",)),
    "chats with a broken line": (lambda refs: jsonl(refs["broken"]), ("line 3",)),
    "chats that are prompts": (lambda refs: jsonl(refs["prompts"]), ("line 1", "messages")),
    "prompts with a broken line": (
        lambda refs: grpo(task={"kind": "jsonl", "data": refs["broken prompts"]}),
        ("line 5",),
    ),
    "pattern that does not compile": (
        lambda _: grpo(task={**SUMS, "reward": {"kind": "regex", "pattern": "("}}),
        ("does not compile",),
    ),
}
