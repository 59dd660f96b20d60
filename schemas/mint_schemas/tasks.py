"""Tasks and data: what a policy learns from, what it is scored on, and by which reward."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .common import WHOLE, FileRef, JsonScalar, Strict

__all__ = [
    "ArithmeticTask",
    "Data",
    "ExactMatch",
    "JsonlMessages",
    "JsonlPairs",
    "JsonlPrompts",
    "MathVerify",
    "Pairs",
    "PluginReward",
    "ReasoningGym",
    "Regex",
    "Reward",
    "Seed",
    "Task",
    "TaskDemonstrations",
    "WebhookReward",
]

Seed = Annotated[int, Field(ge=0, lt=2**31), WHOLE]


class ExactMatch(Strict):
    """1.0 when the completion, stripped, equals the expected answer, else 0.0."""

    kind: Literal["exact_match"] = "exact_match"


class Regex(Strict):
    """1.0 when `pattern` matches; its first group, if any, must equal the expected answer."""

    kind: Literal["regex"]
    pattern: Annotated[str, Field(min_length=1, max_length=1000)]


class MathVerify(Strict):
    """1.0 when the completion's last mathematical expression equals the expected answer, else 0.0."""

    kind: Literal["math_verify"]


class PluginReward(Strict):
    """The Python entry point `name` of the group `mint.rewards`, installed where rollouts are scored."""

    kind: Literal["plugin"]
    name: Annotated[str, Field(min_length=1, max_length=100)]
    config: dict[str, JsonScalar] = Field({})


class WebhookReward(Strict):
    """An HTTP service that scores batches; its host must be on the operators' list.

    POST `{"items": [{"id", "prompt", "completion", "answer"}]}`, answered by `{"scores": [number]}`."""

    kind: Literal["webhook"]
    url: Annotated[str, Field(min_length=1, max_length=2000, pattern=r"^https?://")]
    timeout_s: Annotated[float, Field(ge=0.1, le=300, allow_inf_nan=False)] = 10.0
    batch_size: Annotated[int, Field(ge=1, le=1024), WHOLE] = 64
    retries: Annotated[int, Field(ge=0, le=10), WHOLE] = 3


def _with_kind(value: Any) -> Any:
    return {"kind": "exact_match"} if value == {} else value


Reward = Annotated[
    ExactMatch | Regex | MathVerify | PluginReward | WebhookReward,
    Field(discriminator="kind"),
    BeforeValidator(_with_kind),
]


class ArithmeticTask(Strict):
    """`What is a+b?` for 0 ≤ a, b ≤ `max_operand`; a fixed fifth of the pairs is held out."""

    kind: Literal["arithmetic"]
    max_operand: Annotated[int, Field(ge=9, le=9999), WHOLE] = 99
    reward: Reward = ExactMatch()


class JsonlPrompts(Strict):
    """One JSON object a line: `prompt` (text or chat messages) and `answer`.

    `held_out` of the lines (by hash of the prompt) are kept for evaluation and never trained on."""

    kind: Literal["jsonl"]
    data: FileRef
    reward: Reward = ExactMatch()
    held_out: Annotated[float, Field(ge=0, le=0.9, allow_inf_nan=False)] = 0.2


class ReasoningGym(Strict):
    """`size` items of a generator of reasoning-gym, scored by its own verifier.

    `config` holds the generator's own settings. `held_out` of the items (by hash of the prompt) are kept
    for evaluation and never trained on."""

    kind: Literal["reasoning_gym"]
    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[a-z0-9_]+$")]
    size: Annotated[int, Field(ge=2, le=100_000), WHOLE] = 2000
    seed: Seed = 0
    config: dict[str, JsonScalar | list[JsonScalar]] = Field({})
    held_out: Annotated[float, Field(ge=0, le=0.9, allow_inf_nan=False)] = 0.2


Task = Annotated[ArithmeticTask | JsonlPrompts | ReasoningGym, Field(discriminator="kind")]


class TaskDemonstrations(Strict):
    """The task's own train prompts with their exact answers."""

    kind: Literal["task"]
    task: Task


class JsonlMessages(Strict):
    """One JSON object a line: `messages`, a chat; a message may carry `weight` 0 or 1 (see `Sft.train_on`)."""

    kind: Literal["jsonl"]
    data: FileRef


Data = Annotated[TaskDemonstrations | JsonlMessages, Field(discriminator="kind")]


class JsonlPairs(Strict):
    """One JSON object a line: `prompt` (text or chat messages), `chosen` and `rejected` (texts)."""

    kind: Literal["jsonl"]
    data: FileRef


Pairs = JsonlPairs
