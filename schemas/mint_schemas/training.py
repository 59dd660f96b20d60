"""`TrainRequested`: what a product system publishes to get a better policy.

`method`, `task`, `reward` and `data` are tagged unions on `kind`; new members are compatible.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .common import FileRef, Finite, Positive, Strict
from .names import AliasName, PolicyName, ReferenceText

__all__ = [
    "ArithmeticTask",
    "Data",
    "Evaluation",
    "ExactMatch",
    "Gate",
    "Grpo",
    "JsonlPrompts",
    "JsonlMessages",
    "Lora",
    "Method",
    "Optimizer",
    "Regex",
    "Reward",
    "Sft",
    "Task",
    "TaskDemonstrations",
    "TrainRequested",
]

Steps = Annotated[int, Field(ge=1, le=100_000)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]


class ExactMatch(Strict):
    """1.0 when the completion, stripped, equals the expected answer, else 0.0."""

    kind: Literal["exact_match"] = "exact_match"


class Regex(Strict):
    """1.0 when `pattern` matches; its first group, if any, must equal the expected answer."""

    kind: Literal["regex"]
    pattern: Annotated[str, Field(min_length=1, max_length=1000)]


Reward = Annotated[ExactMatch | Regex, Field(discriminator="kind")]


class ArithmeticTask(Strict):
    """`What is a+b?` for 0 ≤ a, b ≤ `max_operand`; a fixed fifth of the pairs is held out."""

    kind: Literal["arithmetic"]
    max_operand: Annotated[int, Field(ge=9, le=9999)] = 99
    reward: Reward = ExactMatch()


class JsonlPrompts(Strict):
    """One JSON object a line: `prompt` (text or chat messages) and `answer`.

    `held_out` of the lines (by hash of the prompt) are kept for evaluation and never trained on."""

    kind: Literal["jsonl"]
    data: FileRef
    reward: Reward = ExactMatch()
    held_out: Annotated[float, Field(ge=0, le=0.9, allow_inf_nan=False)] = 0.2


Task = Annotated[ArithmeticTask | JsonlPrompts, Field(discriminator="kind")]


class TaskDemonstrations(Strict):
    """The task's own train prompts with their exact answers."""

    kind: Literal["task"]
    task: Task


class JsonlMessages(Strict):
    """One JSON object a line: `messages`, a chat; the loss is on the assistant's turns."""

    kind: Literal["jsonl"]
    data: FileRef


Data = Annotated[TaskDemonstrations | JsonlMessages, Field(discriminator="kind")]


class Lora(Strict):
    rank: Annotated[int, Field(ge=1, le=512)] = 8
    alpha: Positive = 32.0
    use_rslora: bool = False
    target_modules: Annotated[tuple[str, ...], Field(min_length=1, max_length=16)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )


class Optimizer(Strict):
    """AdamW (arXiv:1711.05101), its moments afresh for each run; global gradient norm clipped."""

    learning_rate: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    beta1: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.95
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    grad_clip_norm: Positive = 1.0


class Sft(Strict):
    kind: Literal["sft"]
    data: Data
    steps: Steps
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 32
    optimizer: Optimizer = Optimizer(learning_rate=2e-3)
    save_every: Annotated[int, Field(ge=1)] | None = None
    max_length: Annotated[int, Field(ge=8, le=1_000_000)] = 1024


class Grpo(Strict):
    """Group relative policy optimisation (arXiv:2402.03300), one optimizer step per rollout record."""

    kind: Literal["grpo"]
    task: Task
    steps: Steps
    prompts_per_step: Annotated[int, Field(ge=1, le=4096)] = 12
    group_size: Annotated[int, Field(ge=2, le=1024)] = 8
    max_tokens: Annotated[int, Field(ge=1, le=131_072)] = 64
    temperature: Annotated[float, Field(ge=0.01, le=10, allow_inf_nan=False)] = 1.0
    optimizer: Optimizer = Optimizer(learning_rate=5e-4)
    clip_low: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.2
    clip_high: Annotated[float, Field(gt=0, lt=10, allow_inf_nan=False)] = 0.2
    loss_aggregation: Literal["grpo", "token", "dr_grpo"] = "grpo"


Method = Annotated[Sft | Grpo, Field(discriminator="kind")]


class Gate(Strict):
    """What the last revision must reach to be promoted. Both conditions, where both are given."""

    at_least: Finite | None = None
    no_worse_than: Literal["parent", "base"] | None = None


class Evaluation(Strict):
    """Greedy decoding over `items` held-out items of `task`, scored by the task's reward."""

    task: Task
    items: Annotated[int, Field(ge=1, le=100_000)] = 256
    max_tokens: Annotated[int, Field(ge=1, le=131_072)] = 64
    gate: Gate = Gate()


class TrainRequested(Strict):
    """Ask for a better policy. Publishing the same (ce-source, ce-id) twice is one run."""

    policy: PolicyName
    base: Annotated[str, Field(min_length=1, max_length=200)]
    method: Method
    lora: Lora = Lora()
    parent: ReferenceText | None = None
    evaluation: Evaluation | None = None
    promote_to: AliasName | None = "live"
    seed: Seed = 0
