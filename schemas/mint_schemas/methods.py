"""Methods: how a policy is trained, with its LoRA shape and optimizer.

`Method` is a tagged union on `kind`; new members are compatible.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .common import WHOLE, Positive, Strict
from .tasks import Data, Pairs, Task

__all__ = [
    "Correction",
    "Dpo",
    "Grpo",
    "IcePop",
    "KlPenalty",
    "Lora",
    "Method",
    "Optimizer",
    "Sft",
    "Steps",
    "Tis",
]

Steps = Annotated[int, Field(ge=1, le=100_000), WHOLE]


class Lora(Strict):
    rank: Annotated[int, Field(ge=1, le=512), WHOLE] = 8
    alpha: Positive = 32.0
    use_rslora: bool = False
    target_modules: Annotated[tuple[str, ...], Field(min_length=1, max_length=16, strict=False)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )


class Optimizer(Strict):
    """AdamW (arXiv:1711.05101), its moments afresh for each run; global gradient norm clipped.

    The learning rate grows linearly to `learning_rate` over `warmup_steps`, then stays (`constant`) or
    falls along `schedule` to `final_ratio` of it at the end of the run."""

    learning_rate: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    beta1: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.95
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    grad_clip_norm: Positive = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0, le=100_000), WHOLE] = 0
    final_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0


class Sft(Strict):
    """Supervised fine-tuning on chats.

    `train_on`: `assistant` = every turn of the assistant but those of `weight` 0; `last` = the chat's last
    turn, which is the assistant's; `chosen` = the turns of `weight` 1, whoever speaks."""

    kind: Literal["sft"]
    data: Data
    steps: Steps
    batch_size: Annotated[int, Field(ge=1, le=4096), WHOLE] = 32
    optimizer: Optimizer = Optimizer(learning_rate=2e-3)
    save_every: Annotated[int, Field(ge=1), WHOLE] | None = None
    max_length: Annotated[int, Field(ge=8, le=1_000_000), WHOLE] = 1024
    train_on: Literal["assistant", "last", "chosen"] = "assistant"


class Dpo(Strict):
    """Direct preference optimisation (arXiv:2305.18290) against the run's starting revision.

    `batch_size` counts pairs."""

    kind: Literal["dpo"]
    data: Pairs
    steps: Steps
    batch_size: Annotated[int, Field(ge=1, le=4096), WHOLE] = 16
    beta: Positive = 0.1
    optimizer: Optimizer = Optimizer(learning_rate=5e-4)
    save_every: Annotated[int, Field(ge=1), WHOLE] | None = None
    max_length: Annotated[int, Field(ge=8, le=1_000_000), WHOLE] = 1024


class KlPenalty(Strict):
    """Distance from the run's starting revision (http://joschu.net/blog/kl-approx.html).

    With d = lp_ref − lp: `k1` takes −d off the advantages; `k2` (½d²) and `k3` (e^d − d − 1) are added to
    the loss; `times_ratio` multiplies k3 by the policy ratio, which makes its gradient unbiased."""

    coefficient: Positive
    estimator: Literal["k1", "k2", "k3"] = "k3"
    times_ratio: bool = False

    @model_validator(mode="after")
    def _ratio_of_k3(self) -> KlPenalty:
        if self.times_ratio and self.estimator != "k3":
            raise ValueError(f"times_ratio goes with k3, not with {self.estimator}")
        return self


class Tis(Strict):
    """Truncated importance sampling: each token's loss times min(w, `cap`), w = exp(lp_old − q)."""

    kind: Literal["tis"]
    cap: Positive = 2.0


class IcePop(Strict):
    """Each token's loss times w where `low` ≤ w ≤ `high`, else 0 (arXiv:2510.18855)."""

    kind: Literal["icepop"]
    low: Positive = 0.5
    high: Positive = 5.0

    @model_validator(mode="after")
    def _ordered(self) -> IcePop:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}; no token would be left")
        return self


Correction = Annotated[Tis | IcePop, Field(discriminator="kind")]


class Grpo(Strict):
    """Group relative policy optimisation (arXiv:2402.03300).

    `steps` counts optimizer steps. A rollout record gets `epochs` × `minibatches` of them. With `staleness`
    s, record r is sampled with the revision after record r − 1 − s, so that sampling and training overlap.
    `advantage`: (r − mean)/std of the group; `no_std` r − mean (arXiv:2503.20783); `leave_one_out` r − the
    mean of the others (arXiv:2402.14740). `objective`: the ratio of each token, clipped (`grpo`); clipped
    and detached, times the logprob (`cispo`, arXiv:2506.13585); of the sequence (`gspo`, arXiv:2507.18071).
    `mask_overlong`: a completion that was cut at `max_tokens` takes no part (arXiv:2503.14476)."""

    kind: Literal["grpo"]
    task: Task
    steps: Steps
    prompts_per_step: Annotated[int, Field(ge=1, le=4096), WHOLE] = 12
    group_size: Annotated[int, Field(ge=2, le=1024), WHOLE] = 8
    max_tokens: Annotated[int, Field(ge=1, le=131_072), WHOLE] = 64
    temperature: Annotated[float, Field(ge=0.01, le=10, allow_inf_nan=False)] = 1.0
    optimizer: Optimizer = Optimizer(learning_rate=5e-4)
    clip_low: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.2
    clip_high: Annotated[float, Field(gt=0, lt=10, allow_inf_nan=False)] = 0.2
    loss_aggregation: Literal["grpo", "token", "dr_grpo"] = "grpo"
    objective: Literal["grpo", "cispo", "gspo"] = "grpo"
    advantage: Literal["std", "no_std", "leave_one_out"] = "std"
    drop_zero_variance: bool = True
    mask_overlong: bool = False
    epochs: Annotated[int, Field(ge=1, le=64), WHOLE] = 1
    minibatches: Annotated[int, Field(ge=1, le=256), WHOLE] = 1
    staleness: Annotated[int, Field(ge=0, le=8), WHOLE] = 0
    kl: KlPenalty | None = None
    correction: Correction | None = None

    @property
    def steps_per_record(self) -> int:
        return self.epochs * self.minibatches

    @model_validator(mode="after")
    def _whole_records(self) -> Grpo:
        if self.steps % self.steps_per_record:
            raise ValueError(
                f"steps is {self.steps}; with {self.epochs} epochs of {self.minibatches} minibatches a record gets "
                f"{self.steps_per_record} steps, so steps must be a multiple of {self.steps_per_record}"
            )
        if self.minibatches > self.prompts_per_step:
            raise ValueError(
                f"{self.minibatches} minibatches of {self.prompts_per_step} prompts; a minibatch needs one"
            )
        return self


Method = Annotated[Sft | Dpo | Grpo, Field(discriminator="kind")]
