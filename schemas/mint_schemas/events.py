"""Events: facts that happened. Enums are open: readers accept values that they do not know."""

from __future__ import annotations

from .commands import CheckpointRef
from .common import Body, FileRef

__all__ = [
    "AliasMoved",
    "PolicyUpdated",
    "RevisionEvaluated",
    "RevisionExported",
    "RevisionReady",
    "RevisionRegistered",
    "RolloutCompleted",
    "RunEnded",
    "RunStateChanged",
]


class _RunFact(Body):
    run_id: str
    policy: str
    base: str


class RolloutCompleted(_RunFact):
    """A rollout record is committed. `revision` and `adapter_sha256` say what sampled it."""

    command_id: str
    step: int
    record: FileRef
    revision: str | None
    adapter_sha256: str | None
    groups: int
    trajectories: int
    tokens: int
    reward_mean: float
    seconds: float


class PolicyUpdated(_RunFact):
    """One optimizer step is committed with its training checkpoint.

    `metrics` of every method: loss, grad_norm, tokens (all input tokens of the step), learning_rate,
    optimizer_step. GRPO: reward_mean, reward_std, completion_tokens_mean, completion_tokens_max,
    truncated_share, kept_groups, dropped_groups, advantage_abs_mean, kl (with a reference), clip_share,
    mismatch_mean, mismatch_max, ratio_mean, effective_sample_size. SFT: rows, truncated_rows, nll. DPO:
    margin, accuracy, chosen_reward, rejected_reward, truncated_rows. `skipped`: no row was left, so no
    step was made; what is known without one is there."""

    command_id: str
    step: int
    checkpoint: CheckpointRef
    adapter_changed: bool
    skipped: bool = False
    metrics: dict[str, float]
    seconds: float


class RevisionExported(_RunFact):
    """The serving layout is stored. It becomes a revision when it is registered."""

    command_id: str
    step: int
    manifest: FileRef
    adapter_sha256: str
    adapter_bytes: int
    zero_delta: bool
    seconds: float


class RevisionRegistered(_RunFact):
    """A revision number was allocated; the revision exists from now on."""

    revision: str
    number: int
    step: int
    adapter_sha256: str
    adapter_bytes: int
    parent: str | None


class RevisionReady(Body):
    """A serving replica proved the revision in its engine and serves it."""

    revision: str
    base: str
    replica: str
    boot_id: str
    adapter_sha256: str
    modules_applied: int
    modules_expected: int
    tensors_equal: bool
    probe_max_abs_diff: float | None
    seconds: float


class RevisionEvaluated(_RunFact):
    """A score, named by everything that it depends on."""

    command_id: str
    revision: str | None
    adapter_sha256: str | None
    task_sha256: str
    scorer: str
    sampling: dict[str, float]
    items: int
    score: float
    details: FileRef
    seconds: float


class AliasMoved(Body):
    """An alias points at another revision. `reason` is promotion, rollback or manual (open)."""

    policy: str
    base: str
    alias: str
    version: int
    revision: str
    previous: str | None
    reason: str
    actor: str
    run_id: str | None = None


class RunStateChanged(_RunFact):
    """A run moved to queued, running, evaluating or promoting."""

    state: str
    previous: str | None


class RunEnded(Body):
    """A run is over. `request_source` and `request_id` are the ce-source and ce-id of the request, so
    that whoever asked can find the answer. `outcome` says in words what happened."""

    run_id: str
    state: str
    policy: str | None
    base: str | None
    outcome: str
    request_source: str
    request_id: str
    revision: str | None = None
    promoted: bool = False
    score: float | None = None
