"""Commands: the catalog asks one service for one piece of work. Each body names its command id,
under which the worker takes, renews and commits it (`shared/catalog/api.py`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .common import Body, FileRef
from .names import ReferenceText
from .training import Lora, Method, Task

__all__ = [
    "CheckpointRef",
    "Command",
    "EvaluationRequested",
    "ExportRequested",
    "OperationsRequested",
    "RolloutRequested",
    "SampleRequested",
    "UpdateRequested",
]


class CheckpointRef(Body):
    """A committed training checkpoint: its files by name (`adapter.safetensors`, `optimizer.safetensors`,
    `gradients.safetensors`, `old_logprobs.safetensors`, `state.json`, `probe.json`).

    `optimizer.safetensors` is absent when only the adapter is kept; the gradients are there when some were
    accumulated, the old logprobs while steps of the same rollout record are still to come."""

    files: dict[str, FileRef]
    step: int


class _Work(Body):
    command_id: str
    run_id: str
    policy: str
    base: str


class RolloutRequested(_Work):
    """Sample `prompts` groups of `group_size` for `step` and score them. `record` is the rollout record's
    number in the run (from 1), which picks its prompts, so that an epoch asks each of them once.

    `revision` is tenant/policy@N, or None for the base (a policy without a revision)."""

    kind: Literal["rollout"] = "rollout"
    step: int
    revision: ReferenceText | None
    adapter_sha256: str | None = None
    task: Task
    prompts: int
    group_size: int
    max_tokens: int
    temperature: float
    seed: int
    record: int | None = None


class UpdateRequested(_Work):
    """One optimizer step. `record` (and its epoch and minibatch) for methods that learn from rollouts.

    `start`: the training checkpoint to continue from; None = a fresh adapter. `fresh_optimizer` says
    that only the adapter of `start` is taken (the first step of a run). `reference`: the training
    checkpoint of the run's starting revision, for methods that measure their distance from it; None = the
    base model is the reference. `record_step`: the step that the record was sampled for, the first of
    those that use it."""

    kind: Literal["update"] = "update"
    step: int
    steps: int
    method: Method
    lora: Lora
    seed: int
    start: CheckpointRef | None
    fresh_optimizer: bool
    record: FileRef | None = None
    epoch: int = 0
    minibatch: int = 0
    record_step: int | None = None
    reference: CheckpointRef | None = None
    export: bool = Field(description="whether this step's result will be exported, so that a probe is recorded")


class ExportRequested(_Work):
    """Turn a committed training checkpoint into the serving layout."""

    kind: Literal["export"] = "export"
    step: int
    checkpoint: CheckpointRef
    lora: Lora
    parent: ReferenceText | None


class EvaluationRequested(_Work):
    """Score `revision` (None = the base) greedily on held-out items."""

    kind: Literal["evaluation"] = "evaluation"
    revision: ReferenceText | None
    adapter_sha256: str | None = None
    task: Task
    items: int
    max_tokens: int
    seed: int


class OperationsRequested(Body):
    """Operations of `policy` wait. Whoever gets its lease works on them in order, and asks the catalog for them."""

    policy: str
    base: str


class SampleRequested(Body):
    """A sample operation waits; whoever takes it asks the catalog for its content."""

    request_id: str
    base: str


Command = Annotated[
    RolloutRequested | UpdateRequested | ExportRequested | EvaluationRequested, Field(discriminator="kind")
]
