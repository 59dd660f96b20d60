"""What a score or a record is about: the digest of a task's prompts and their split.

It is computed from the request alone; data enters by its sha256, a generator by its release. The reward is
not part of it, since a score names its scorer separately.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from mint_schemas.training import ArithmeticTask, JsonlPrompts, ReasoningGym, Task

from shared.tasks.gym import gym_version

__all__ = ["task_digest"]

SPLIT_RULE = 1
"""Goes up whenever the same task would give other items or another split."""


def task_digest(task: Task) -> str:
    """sha256 of the canonical JSON of everything that decides the items. Raises ValueError for a generator
    whose library is not installed."""
    content: dict[str, Any]
    match task:
        case ArithmeticTask():
            content = {"max_operand": task.max_operand}
        case JsonlPrompts():
            content = {"data": task.data.sha256, "held_out": task.held_out}
        case ReasoningGym():
            fields = {"name", "size", "seed", "config", "held_out"}
            content = {**task.model_dump(include=fields), "release": gym_version(task)}
    text = json.dumps({"kind": task.kind, "split": SPLIT_RULE, **content}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
