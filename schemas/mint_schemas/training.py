"""`TrainRequested`: what a product system publishes to get a better policy.

`method`, `task`, `reward` and `data` are tagged unions on `kind`; new members are compatible.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .common import FileRef, Finite, JsonScalar, Positive, Strict
from .names import AliasName, PolicyName, ReferenceText

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

Steps = Annotated[int, Field(ge=1, le=100_000)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]


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
    batch_size: Annotated[int, Field(ge=1, le=1024)] = 64
    retries: Annotated[int, Field(ge=0, le=10)] = 3


Reward = Annotated[ExactMatch | Regex | MathVerify | PluginReward | WebhookReward, Field(discriminator="kind")]


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


class ReasoningGym(Strict):
    """`size` items of a generator of reasoning-gym, scored by its own verifier.

    `config` holds the generator's own settings. `held_out` of the items (by hash of the prompt) are kept
    for evaluation and never trained on."""

    kind: Literal["reasoning_gym"]
    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[a-z0-9_]+$")]
    size: Annotated[int, Field(ge=2, le=100_000)] = 2000
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
    warmup_steps: Annotated[int, Field(ge=0, le=100_000)] = 0
    final_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0


class Sft(Strict):
    """Supervised fine-tuning on chats.

    `train_on`: `assistant` = every turn of the assistant but those of `weight` 0; `last` = the chat's last
    turn, which is the assistant's; `chosen` = the turns of `weight` 1, whoever speaks."""

    kind: Literal["sft"]
    data: Data
    steps: Steps
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 32
    optimizer: Optimizer = Optimizer(learning_rate=2e-3)
    save_every: Annotated[int, Field(ge=1)] | None = None
    max_length: Annotated[int, Field(ge=8, le=1_000_000)] = 1024
    train_on: Literal["assistant", "last", "chosen"] = "assistant"


class Dpo(Strict):
    """Direct preference optimisation (arXiv:2305.18290) against the run's starting revision.

    `batch_size` counts pairs."""

    kind: Literal["dpo"]
    data: Pairs
    steps: Steps
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 16
    beta: Positive = 0.1
    optimizer: Optimizer = Optimizer(learning_rate=5e-4)
    save_every: Annotated[int, Field(ge=1)] | None = None
    max_length: Annotated[int, Field(ge=8, le=1_000_000)] = 1024


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
    prompts_per_step: Annotated[int, Field(ge=1, le=4096)] = 12
    group_size: Annotated[int, Field(ge=2, le=1024)] = 8
    max_tokens: Annotated[int, Field(ge=1, le=131_072)] = 64
    temperature: Annotated[float, Field(ge=0.01, le=10, allow_inf_nan=False)] = 1.0
    optimizer: Optimizer = Optimizer(learning_rate=5e-4)
    clip_low: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.2
    clip_high: Annotated[float, Field(gt=0, lt=10, allow_inf_nan=False)] = 0.2
    loss_aggregation: Literal["grpo", "token", "dr_grpo"] = "grpo"
    objective: Literal["grpo", "cispo", "gspo"] = "grpo"
    advantage: Literal["std", "no_std", "leave_one_out"] = "std"
    drop_zero_variance: bool = True
    mask_overlong: bool = False
    epochs: Annotated[int, Field(ge=1, le=64)] = 1
    minibatches: Annotated[int, Field(ge=1, le=256)] = 1
    staleness: Annotated[int, Field(ge=0, le=8)] = 0
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


class StopWhen(Strict):
    """End the run early, at the first that holds, as if its last step had come.

    `target_score`: an evaluation reaches it. `no_progress_steps`: so many steps without an evaluation above
    the best so far. `max_tokens`: so many tokens sampled and trained on, together."""

    target_score: Finite | None = None
    no_progress_steps: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _something(self) -> StopWhen:
        if self.target_score is None and self.no_progress_steps is None and self.max_tokens is None:
            raise ValueError("name at least one of target_score, no_progress_steps, max_tokens")
        return self


class TrainRequested(Strict):
    """Ask for a better policy. Publishing the same (ce-source, ce-id) twice is one run.

    `eval_every`: the revision of every so many steps is scored too. `promote`: the last revision, or the
    one of the best score (the later one of two that are equal)."""

    policy: PolicyName
    base: Annotated[str, Field(min_length=1, max_length=200)]
    method: Method
    lora: Lora = Lora()
    parent: ReferenceText | None = None
    evaluation: Evaluation | None = None
    promote_to: AliasName | None = "live"
    seed: Seed = 0
    eval_every: Annotated[int, Field(ge=1)] | None = None
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
