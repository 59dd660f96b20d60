"""The JSON that clients send, but for data: one message a route, as both generations of the public SDKs write them.

Invariant: a field that is not known is refused by name, and so is, in the handlers, every known field that asks for
what is not offered; nothing is silently left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "MAX_CLIENTS",
    "AdamParams",
    "ClientConfig",
    "CreateModel",
    "CreateSamplingSession",
    "CreateSession",
    "FinishSession",
    "FutureRef",
    "Heartbeat",
    "JoinSamplingSession",
    "LoadWeights",
    "LoraConfig",
    "ModelRef",
    "OptimStep",
    "Place",
    "RetrieveFuture",
    "RetrieveFutures",
    "Sample",
    "SamplingParams",
    "SaveWeights",
    "SaveWeightsExternal",
    "SaveWeightsForSampler",
    "SeqId",
]

MAX_SEQ_ID = 2**31 - 1
MAX_LONG = 2**63 - 1
MAX_CLIENTS = 10**9
"""Of one sampling session; each numbers its samples from that many times its own number."""

Id = Annotated[str, Field(min_length=1, max_length=300)]
Path = Annotated[str, Field(min_length=1, max_length=1000)]
SeqId = Annotated[int, Field(ge=1, le=MAX_SEQ_ID)]
Count = Annotated[int, Field(ge=0, le=MAX_LONG)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Metadata = Annotated[dict[str, Any], Field(max_length=100)]


class Sent(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class ClientConfig(Sent):
    """Whatever a newer client adds here is about itself."""

    model_config = ConfigDict(extra="ignore")
    sdk_version: Annotated[str, Field(max_length=100)] = ""


class CreateSession(Sent):
    tags: Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=100)] = []
    user_metadata: Metadata | None = None
    sdk_version: Annotated[str, Field(max_length=100)] = ""
    project_id: str | None = None
    display_name: Annotated[str, Field(max_length=500)] | None = None
    type: Literal["create_session"] = "create_session"


class Heartbeat(Sent):
    session_id: Id
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Sent):
    type: Annotated[str, Field(max_length=100)]


class FinishSession(Sent):
    reason: FinishReason | None = None
    detail: Annotated[str, Field(max_length=4000)] | None = None


class LoraConfig(Sent):
    rank: Annotated[int, Field(ge=1)]
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Sent):
    session_id: Id
    model_seq_id: Count
    base_model: Path
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: dict[str, Any] | None = None
    type: Literal["create_model"] = "create_model"


class ModelRef(Sent):
    model_id: Id
    type: Literal["get_info", "unload_model"] | None = None


class AdamParams(Sent):
    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class Place(Sent):
    """Where an operation stands: its model, and its number there."""

    model_id: Id
    seq_id: SeqId


class OptimStep(Sent):
    """`adam_params` is an AdamParams, looked at when the operation has its place; `optimizer_params` is where other
    optimizers than Adam would be."""

    model_id: Id
    seq_id: SeqId
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None
    type: Literal["optim_step"] = "optim_step"


class SaveWeights(Sent):
    model_id: Id
    seq_id: SeqId
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSampler(Sent):
    model_id: Id
    seq_id: SeqId
    path: str | None = None
    sampling_session_seq_id: Count | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsExternal(Sent):
    """Not offered; whatever else it says does not matter."""

    model_config = ConfigDict(extra="ignore")
    model_id: Id
    seq_id: SeqId


class LoadWeights(Sent):
    """Onto a model (`model_id` and `seq_id`), or as the beginning of a new one (`session_id` and `model_seq_id`)."""

    path: Path
    optimizer: bool
    model_id: Id | None = None
    seq_id: SeqId | None = None
    session_id: Id | None = None
    model_seq_id: Count | None = None
    base_model: Path | None = None
    user_metadata: Metadata | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class CreateSamplingSession(Sent):
    session_id: Id
    sampling_session_seq_id: Count
    base_model: Path | None = None
    model_path: Path | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class SamplingParams(Sent):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_SEQ_ID)] | None = None
    seed: Seed | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_SEQ_ID)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class Sample(Sent):
    """The fields behind `topk_prompt_logprobs` ask for what is not offered, unless they have these values."""

    prompt: dict[str, Any]
    sampling_params: SamplingParams
    num_samples: Annotated[int, Field(ge=1)] = 1
    base_model: Path | None = None
    model_path: Path | None = None
    sampling_session_id: Id | None = None
    seq_id: Count | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class FutureRef(Sent):
    request_id: Id


class RetrieveFuture(Sent):
    request_id: Id
    model_id: Id | None = None
    allow_metadata_only: bool = False


class SamplesTarget(Sent):
    sampling_session_id: Id
    cloned_sampler_id: Annotated[int, Field(ge=0, le=MAX_CLIENTS)] = 0
    type: Literal["sampling_session"] = "sampling_session"


class RetrieveFutures(Sent):
    """`timeout`: how long the client wants this held, in seconds. `retrieved_request_ids` may be forgotten."""

    target: SamplesTarget
    prev_cursor: Count = 0
    timeout: Annotated[float, Field(ge=0)] | None = None
    retrieved_request_ids: list[Id] = []


class JoinSamplingSession(Sent):
    sampling_session_id: Id
    type: Literal["join_sampling_session"] = "join_sampling_session"
