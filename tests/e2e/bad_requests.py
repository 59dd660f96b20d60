"""Requests that cannot run, each with the words that its refusal must hold: what is wrong, what is allowed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.tiny import TINY_NAME

Refs = dict[str, dict[str, Any]]
"""Uploaded files by name: `chats`, `prompts` and `pairs`; `broken`, whose third line is no JSON, `broken
prompts`, whose fifth is none, and `equal pairs`, whose second prefers nothing."""

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


def scored(method: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """With an evaluation."""
    return sft(method, evaluation={"task": SUMS, "items": 2}, **changes)


def rewarded(**reward: Any) -> dict[str, Any]:
    return grpo(task={**SUMS, "reward": reward})


def pairs(ref: dict[str, Any]) -> dict[str, Any]:
    return sft({"kind": "dpo", "data": {"kind": "jsonl", "data": ref}})


def rate(value: Any) -> dict[str, Any]:
    return sft({"optimizer": {"learning_rate": value}})


def jsonl(ref: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return sft({"data": {"kind": "jsonl", "data": {**ref, **changes}}})


def text_of(body: dict[str, Any]) -> str:
    return json.dumps(body).replace(f'"{INFINITE}"', "1e999")


BAD: dict[str, tuple[Callable[[Refs], dict[str, Any]], tuple[str, ...]]] = {
    "unknown base": (lambda _: sft(base="tiny/lama"), ("base", "tiny/lama", f"did you mean {TINY_NAME}", "known are")),
    "unknown method": (lambda _: sft({"kind": "ppo"}), ("method", "ppo", "'sft', 'dpo', 'grpo'")),
    "unknown task": (
        lambda _: grpo(task={"kind": "chess"}),
        ("task", "chess", "'arithmetic', 'jsonl', 'reasoning_gym'"),
    ),
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
    "generator config NaN": (
        lambda _: grpo(task={"kind": "reasoning_gym", "name": "chain_sum", "config": {"min_terms": float("nan")}}),
        ("config.min_terms", "finite number"),
    ),
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
    "steps that leave a record half used": (
        lambda _: grpo(steps=6, epochs=2, minibatches=2),
        ("steps is 6", "a record gets 4 steps", "multiple of 4"),
    ),
    "more minibatches than prompts": (
        lambda _: grpo(steps=3, minibatches=3),
        ("3 minibatches of 2 prompts", "a minibatch needs one"),
    ),
    "promote best without scores on the way": (
        lambda _: scored(promote="best"),
        ("promote: best needs eval_every",),
    ),
    "stop at a score without scores on the way": (
        lambda _: scored(stop_when={"target_score": 0.5}),
        ("stop_when on scores needs eval_every",),
    ),
    "stop when nothing holds": (
        lambda _: sft(stop_when={}),
        ("stop_when", "target_score, no_progress_steps, max_tokens"),
    ),
    "eval_every without an evaluation": (lambda _: sft(eval_every=1), ("eval_every needs an evaluation",)),
    "eval_every inside a record": (
        lambda _: {**grpo(steps=8, epochs=2, minibatches=2), "eval_every": 3, "evaluation": {"task": SUMS, "items": 2}},
        ("eval_every: 3 is no multiple of 4", "allowed are 4, 8, 12"),
    ),
    "icepop with nothing between": (
        lambda _: grpo(correction={"kind": "icepop", "low": 3.0, "high": 2.0}),
        ("correction", "low 3.0 is above high 2.0"),
    ),
    "warm-up longer than the run": (
        lambda _: sft({"optimizer": {"learning_rate": 0.1, "warmup_steps": 2}}),
        ("warmup_steps: 2 is above the run's 1 steps", "allowed are 0 to 1"),
    ),
    "unknown generator": (
        lambda _: grpo(task={"kind": "reasoning_gym", "name": "chain_summ"}),
        ("chain_summ", "chain_sum"),
    ),
    "unknown setting of a generator": (
        lambda _: grpo(task={"kind": "reasoning_gym", "name": "chain_sum", "config": {"colour": 1}}),
        ("chain_sum", "colour"),
    ),
    "webhook on a host that is not allowed": (
        lambda _: rewarded(kind="webhook", url="http://rewards.example/score"),
        ("rewards.example:80 is not allowed", "allowed are: 127.0.0.1", "MINT_REWARD_HOSTS"),
    ),
    "webhook with a password": (
        lambda _: rewarded(kind="webhook", url="http://me:secret@127.0.0.1/score"),
        ("without a user or password",),
    ),
    "unknown plugin": (
        lambda _: rewarded(kind="plugin", name="politeness"),
        ("no reward plugin 'politeness' is installed", "mint.rewards", "letters, undefined"),
    ),
    "plugin without what it needs": (
        lambda _: rewarded(kind="plugin", name="letters"),
        ("the reward plugin 'letters' cannot be used", "KeyError"),
    ),
    "pairs without a preference": (
        lambda refs: pairs(refs["equal pairs"]),
        ("line 2", "`chosen` and `rejected` are equal"),
    ),
    "pairs that are chats": (lambda refs: pairs(refs["chats"]), ("line 1",)),
    "beta 0": (lambda refs: sft({**pairs(refs["pairs"])["method"], "beta": 0}), ("beta", "greater than 0")),
    "chats without a chosen turn": (
        lambda refs: sft({"data": {"kind": "jsonl", "data": refs["chats"]}, "train_on": "chosen"}),
        ("line 1", "no message has the weight 1"),
    ),
}
