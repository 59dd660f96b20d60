"""Data and methods of the tests that train by every method: small, and such that rewards differ.

`SEED_CHATS` teach the tiny base to answer `7` or a row of letters and to end its turn, about equally often, so
that a policy that starts from there has completions of several rewards, some cut at four tokens and some not.
"""

from __future__ import annotations

from typing import Any

from tests.stacks import LETTERS, lines

Ref = dict[str, Any]

ANSWERS = ("7", "k j k j k j")
PROMPTS = [f"Say something about {word} {n}" for word in ("cats", "dogs", "rain") for n in range(8)]
ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


SEED_CHATS = lines(
    *({"messages": [_turn("user", prompt), _turn("assistant", answer)]} for prompt in PROMPTS for answer in ANSWERS)
)


def _long(first: dict[str, Any], second: dict[str, Any]) -> bytes:
    said = "one two three four five six", "seven"
    return lines(
        *(
            {
                "messages": [
                    _turn("user", f"count {n}"),
                    _turn("assistant", said[0], **first),
                    _turn("user", "more"),
                    _turn("assistant", said[1], **second),
                ]
            }
            for n in range(4)
        )
    )


LONG_CHATS = _long({}, {})
"""Two turns of the assistant, of which `last` learns the second alone."""

WEIGHED_CHATS = _long({"weight": 0}, {"weight": 1})
"""The same with weights that say so: `assistant` leaves the first out, `chosen` takes the second in."""

USER_CHATS = lines(
    *(
        {"messages": [_turn("user", f"hello {n}", weight=1), _turn("assistant", "never learn this", weight=0)]}
        for n in range(4)
    )
)
PAIRS = lines(*({"prompt": f"Name a letter {n}", "chosen": "k", "rejected": "a b c"} for n in range(4)))
QUESTIONS = lines(*({"prompt": prompt, "answer": "7"} for prompt in PROMPTS))


def seed_sft(chats: Ref, steps: int = 15) -> dict[str, Any]:
    optimizer = {"learning_rate": 5e-3, "warmup_steps": 3, "schedule": "linear"}
    return sft(chats, steps=steps, batch_size=24, optimizer=optimizer)


def sft(chats: Ref, **more: Any) -> dict[str, Any]:
    return {"kind": "sft", "data": {"kind": "jsonl", "data": chats}, "steps": 2, "batch_size": 4, **more}


def dpo(pairs: Ref, **more: Any) -> dict[str, Any]:
    """Every step sees all four pairs."""
    return {"kind": "dpo", "data": {"kind": "jsonl", "data": pairs}, "steps": 3, "batch_size": 4, **more}


def task(questions: Ref, reward: dict[str, Any] = LETTERS, **more: Any) -> dict[str, Any]:
    return {"kind": "jsonl", "data": questions, "reward": reward, **more}


def grpo(of: dict[str, Any], **more: Any) -> dict[str, Any]:
    sizes = {"prompts_per_step": 4, "group_size": 4, "max_tokens": 4}
    return {"kind": "grpo", "task": of, "steps": 2, **sizes, **more}
