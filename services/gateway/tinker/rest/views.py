"""What REST answers look like: the fields and types that both generations of the public clients read.

Clients ignore what they do not know, so that `note` can say more. Invariant: every time is UTC, and an unknown value
is absent, never made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict

from shared.catalog.operations import ModelView, PathView, SessionView

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "CopiedWeights",
    "Cursor",
    "Future",
    "SessionAnswer",
    "SessionIds",
    "TrainingRun",
    "TrainingRuns",
    "WeightsInfo",
    "checkpoint_of",
    "run_of",
    "session_of",
    "weights_info_of",
]

ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
FEED_FORWARD = frozenset({"gate_proj", "up_proj", "down_proj"})
UNEMBED_NOTE = "train_unembed was asked for and is recorded; the output layer is not trained by this server"


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())


class Checkpoint(Answer):
    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler"]
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    expires_at: datetime | None


class Cursor(Answer):
    offset: int
    limit: int
    total_count: int


class Checkpoints(Answer):
    """`cursor` is absent where all of them are listed."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(Answer):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: Literal[True] = True
    lora_rank: int
    corrupted: Literal[False] = False
    last_request_time: datetime
    last_checkpoint: Checkpoint | None
    last_sampler_checkpoint: Checkpoint | None
    user_metadata: dict[str, str]


class TrainingRuns(Answer):
    training_runs: list[TrainingRun]
    cursor: Cursor


class WeightsInfo(Answer):
    """`train_unembed` is what was trained, so it is false always; `note` says where it was asked for."""

    base_model: str
    is_lora: Literal[True] = True
    lora_rank: int
    train_unembed: Literal[False] = False
    train_mlp: bool
    train_attn: bool
    note: str | None = None


class SessionIds(Answer):
    sessions: list[str]


class SessionAnswer(Answer):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str]
    display_name: str | None


class CopiedWeights(Answer):
    tinker_path: str


class Future(Answer):
    """For `retrieve_future`."""

    request_id: str
    model_id: str | None = None


def checkpoint_of(path: PathView) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=f"{path.kind}/{path.name}",
        checkpoint_type="training" if path.kind == "weights" else "sampler",
        time=_utc(path.created_at),
        tinker_path=path.path,
        size_bytes=path.size_bytes,
        public=path.published,
        expires_at=None if path.expires_at is None else _utc(path.expires_at),
    )


def run_of(model: ModelView, paths: Sequence[PathView]) -> TrainingRun:
    return TrainingRun(
        training_run_id=model.model_id,
        base_model=model.base,
        model_owner=model.tenant,
        lora_rank=model.lora.rank,
        last_request_time=_utc(model.last_request_at),
        last_checkpoint=_newest(paths, "weights"),
        last_sampler_checkpoint=_newest(paths, "sampler_weights"),
        user_metadata=model.user_metadata,
    )


def weights_info_of(path: PathView) -> WeightsInfo:
    """train_attn and train_mlp are true where all of such modules are trained."""
    targets = set(path.lora.target_modules)
    return WeightsInfo(
        base_model=path.base,
        lora_rank=path.lora.rank,
        train_mlp=targets >= FEED_FORWARD,
        train_attn=targets >= ATTENTION,
        note=UNEMBED_NOTE if path.train_unembed else None,
    )


def session_of(session: SessionView) -> SessionAnswer:
    return SessionAnswer(
        training_run_ids=list(session.model_ids),
        sampler_ids=list(session.sampler_ids),
        user_metadata=session.user_metadata,
        display_name=session.user_metadata.get("display_name"),
    )


def _newest(paths: Sequence[PathView], kind: str) -> Checkpoint | None:
    found = max((path for path in paths if path.kind == kind), key=lambda path: path.created_at, default=None)
    return None if found is None else checkpoint_of(found)


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
