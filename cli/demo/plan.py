"""What the demo trains: the two requests, their sizes and what is expected of them."""

from __future__ import annotations

from dataclasses import dataclass

from mint_schemas import TrainRequested
from mint_schemas.training import ArithmeticTask, Evaluation, Gate, Grpo, Optimizer, Sft, TaskDemonstrations

from cli.stack.bases import SMOLLM2_NAME, SMOLLM2_TOKEN


@dataclass(frozen=True)
class Plan:
    """The defaults are `make demo`. `sft_score` is the least score after SFT, `gain` what GRPO must add."""

    policy: str = "acme/adder"
    base: str = SMOLLM2_NAME
    token: str = SMOLLM2_TOKEN
    sft_steps: int = 8
    grpo_steps: int = 12
    prompts: int = 16
    group_size: int = 8
    items: int = 256
    max_tokens: int = 4
    sft_score: float = 0.3
    gain: float = 0.05
    seed: int = 7
    timeout_s: float = 900.0


def sft_request(plan: Plan) -> TrainRequested:
    """Demonstrations with exact answers; the gate asks for the base's score too, so that it is known."""
    return TrainRequested(
        policy=plan.policy,
        base=plan.base,
        method=Sft(
            kind="sft",
            data=TaskDemonstrations(kind="task", task=ArithmeticTask(kind="arithmetic")),
            steps=plan.sft_steps,
            batch_size=32,
            optimizer=Optimizer(learning_rate=1e-3),
        ),
        evaluation=_evaluation(plan, Gate(at_least=plan.sft_score, no_worse_than="base")),
        seed=plan.seed,
    )


def grpo_request(plan: Plan) -> TrainRequested:
    """Continues what `live` points at, rewarded by exact match."""
    return TrainRequested(
        policy=plan.policy,
        base=plan.base,
        method=Grpo(
            kind="grpo",
            task=ArithmeticTask(kind="arithmetic"),
            steps=plan.grpo_steps,
            prompts_per_step=plan.prompts,
            group_size=plan.group_size,
            max_tokens=plan.max_tokens,
            temperature=1.0,
            optimizer=Optimizer(learning_rate=3e-4, warmup_steps=2, schedule="cosine", final_ratio=0.1),
        ),
        evaluation=_evaluation(plan, Gate(at_least=plan.sft_score, no_worse_than="parent")),
        seed=plan.seed + 1,
    )


def _evaluation(plan: Plan, gate: Gate) -> Evaluation:
    return Evaluation(task=ArithmeticTask(kind="arithmetic"), items=plan.items, max_tokens=plan.max_tokens, gate=gate)
