"""`TrainRequested`: what a product system publishes to get a better policy.

`method`, `task`, `reward` and `data` are tagged unions on `kind`; new members are compatible. Their parts
stand in `methods.py` and `tasks.py`, and can be imported from here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .common import WHOLE, Finite, Strict
from .methods import (
    Correction,
    Dpo,
    Grpo,
    IcePop,
    KlPenalty,
    Lora,
    Method,
    Optimizer,
    Sft,
    Tis,
)
from .names import AliasName, PolicyName, ReferenceText
from .tasks import (
    ArithmeticTask,
    Data,
    ExactMatch,
    JsonlMessages,
    JsonlPairs,
    JsonlPrompts,
    MathVerify,
    Pairs,
    PluginReward,
    ReasoningGym,
    Regex,
    Reward,
    Seed,
    Task,
    TaskDemonstrations,
    WebhookReward,
)

__all__ = [
    "ArithmeticTask",
    "Correction",
    "Data",
    "Dpo",
    "Evaluation",
    "ExactMatch",
    "Gate",
    "Grpo",
    "IcePop",
    "JsonlMessages",
    "JsonlPairs",
    "JsonlPrompts",
    "KlPenalty",
    "Lora",
    "MathVerify",
    "Method",
    "Optimizer",
    "Pairs",
    "PluginReward",
    "ReasoningGym",
    "Regex",
    "Reward",
    "Sft",
    "StopWhen",
    "Task",
    "TaskDemonstrations",
    "Tis",
    "TrainRequested",
    "WebhookReward",
]


class Gate(Strict):
    """What the last revision must reach to be promoted. Both conditions, where both are given."""

    at_least: Finite | None = None
    no_worse_than: Literal["parent", "base"] | None = None


class Evaluation(Strict):
    """Greedy decoding over `items` held-out items of `task`, scored by the task's reward."""

    task: Task
    items: Annotated[int, Field(ge=1, le=100_000), WHOLE] = 256
    max_tokens: Annotated[int, Field(ge=1, le=131_072), WHOLE] = 64
    gate: Gate = Gate()


class StopWhen(Strict):
    """End the run early, at the first that holds, as if its last step had come.

    `target_score`: an evaluation reaches it. `no_progress_steps`: so many steps without an evaluation above
    the best so far. `max_tokens`: so many tokens sampled and trained on, together."""

    target_score: Finite | None = None
    no_progress_steps: Annotated[int, Field(ge=1), WHOLE] | None = None
    max_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None

    @model_validator(mode="after")
    def _something(self) -> StopWhen:
        if self.target_score is None and self.no_progress_steps is None and self.max_tokens is None:
            raise ValueError("name at least one of target_score, no_progress_steps, max_tokens")
        return self


class TrainRequested(Strict):
    """Ask for a better policy. Publishing the same (ce-source, ce-id) twice is one run.

    `seed`: two runs of the same request and seed draw the same (rows, prompts, samples, a fresh adapter); without
    one every run draws for itself. `eval_every`: the revision of every so many steps is scored too. `promote`: the
    last revision, or the one of the best score (the later one of two that are equal)."""

    policy: PolicyName
    base: Annotated[str, Field(min_length=1, max_length=200)]
    method: Method
    lora: Lora = Lora()
    parent: ReferenceText | None = None
    evaluation: Evaluation | None = None
    promote_to: AliasName | None = "live"
    seed: Seed | None = None
    eval_every: Annotated[int, Field(ge=1), WHOLE] | None = None
    promote: Literal["last", "best"] = "last"
    stop_when: StopWhen | None = None

    @model_validator(mode="after")
    def _scores_for_what_needs_them(self) -> TrainRequested:
        if self.eval_every is not None and self.evaluation is None:
            raise ValueError("eval_every needs an evaluation: say on which task revisions are scored")
        if self.promote == "best" and self.eval_every is None:
            raise ValueError("promote: best needs eval_every; without it only the last revision has a score")
        stop = self.stop_when
        if stop and self.eval_every is None and (stop.target_score is not None or stop.no_progress_steps is not None):
            raise ValueError("stop_when on scores needs eval_every: say how often revisions are scored")
        return self
