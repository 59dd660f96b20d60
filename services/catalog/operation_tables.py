"""Tables of the service interface: sessions, models, their operations, samplers and paths.

Conventions as in `tables.py`. Invariant: what an operation, path or revision needs of the store has a row in
`file_uses`; a file without one, which no training checkpoint names either, may go.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from services.catalog.tables import Table

__all__ = ["FileUseRow", "ModelRow", "OperationRow", "PathRow", "SamplerRow", "SessionRow"]


class SessionRow(Table):
    """`seen_at`: the last sign of life, a heartbeat or a request."""

    __tablename__ = "sessions"
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    session_id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(63), index=True)
    state: Mapped[str] = mapped_column(String(16), index=True)
    sdk_version: Mapped[str]
    tags: Mapped[list[str]] = mapped_column(JSON)
    user_metadata: Mapped[dict[str, Any]]
    created_at: Mapped[float]
    seen_at: Mapped[float]
    ended_at: Mapped[float | None]
    reason: Mapped[str] = mapped_column(default="")


class ModelRow(Table):
    """`state`: active, closing (what was accepted is finished, nothing else accepted) or unloaded.

    `last_seq` is the highest number accepted, `next_seq` the lowest that a worker is not through with. `state_step` is
    the step of the training checkpoint that the model is at (0: none of its own yet; then `start`, else a fresh
    adapter). `signals` counts the messages that told a learner of the number `signalled_seq`; `signalled_at` is None
    once a learner came. `failure` is what the latest attempt that gave up said."""

    __tablename__ = "models"
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    model_id: Mapped[str] = mapped_column(String(120), unique=True)
    session_id: Mapped[str | None] = mapped_column(ForeignKey("sessions.session_id"), index=True)
    model_seq_id: Mapped[int]
    tenant: Mapped[str] = mapped_column(String(63), index=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), unique=True)
    policy: Mapped[str] = mapped_column(ForeignKey("policies.policy"), unique=True)
    base: Mapped[str]
    lora: Mapped[dict[str, Any]]
    seed: Mapped[int] = mapped_column(BigInteger)
    train_unembed: Mapped[bool]
    user_metadata: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(String(16), index=True)
    start: Mapped[dict[str, Any] | None]
    fresh_optimizer: Mapped[bool]
    state_step: Mapped[int] = mapped_column(default=0)
    last_seq: Mapped[int] = mapped_column(BigInteger, default=0)
    next_seq: Mapped[int] = mapped_column(BigInteger, default=1)
    signals: Mapped[int] = mapped_column(default=0)
    signalled_seq: Mapped[int] = mapped_column(BigInteger, default=0)
    signalled_at: Mapped[float | None]
    failure: Mapped[str] = mapped_column(default="")
    created_at: Mapped[float]
    last_request_at: Mapped[float]


class OperationRow(Table):
    """Ordered within a model by (`seq_id`, `place`): `place` 0 is the client's own number, a higher one comes behind
    it. `worked_at`: its worker is through with it; a sampler save then waits for the command `export`. `details` is
    what the catalog has read of its payload. `takes` counts the leases that began with it. `in_state`: its gradients
    belong to the state that the model is in. `expired`: result and payload are gone. `ended`: of the samples of its
    sampler, the how-manieth to be over. What is asked for at each step of a model (what is open, what is in its state)
    and by each client that waits for samples has an index, so that it costs the same after any number of them."""

    __tablename__ = "operations"
    __table_args__ = (
        UniqueConstraint("model_id", "seq_id", "place", name="uq_operations_model_place"),
        UniqueConstraint("model_id", "key", name="uq_operations_model_key"),
        UniqueConstraint("sampler_id", "seq_id", name="uq_operations_sampler_seq"),
        Index("ix_operations_state_kind", "state", "kind"),
        Index("ix_operations_tenant_kind_state", "tenant", "kind", "state"),
        Index("ix_operations_open", "model_id", "done_at", "worked_at", "seq_id", "place"),
        Index("ix_operations_in_state", "model_id", "in_state", "seq_id", "place"),
        Index("ix_operations_expired_done_at", "expired", "done_at"),
        Index("ix_operations_sampler_ended", "sampler_id", "ended"),
    )
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    request_id: Mapped[str] = mapped_column(String(40), unique=True)
    tenant: Mapped[str] = mapped_column(String(63))
    kind: Mapped[str] = mapped_column(String(32))
    state: Mapped[str] = mapped_column(String(16))
    model_id: Mapped[str | None] = mapped_column(String(120))
    sampler_id: Mapped[str | None] = mapped_column(String(120))
    seq_id: Mapped[int] = mapped_column(BigInteger)
    place: Mapped[int] = mapped_column(default=0)
    key: Mapped[str | None] = mapped_column(String(200))
    digest: Mapped[str] = mapped_column(String(64))
    payload: Mapped[dict[str, Any] | None]
    details: Mapped[dict[str, Any]]
    result: Mapped[dict[str, Any] | None]
    failure: Mapped[dict[str, Any] | None]
    export: Mapped[str | None] = mapped_column(String(200))
    in_state: Mapped[bool] = mapped_column(default=False)
    takes: Mapped[int] = mapped_column(default=0)
    issues: Mapped[int] = mapped_column(default=1)
    accepted_at: Mapped[float]
    worked_at: Mapped[float | None]
    done_at: Mapped[float | None]
    ended: Mapped[int | None] = mapped_column(BigInteger)
    expired: Mapped[bool] = mapped_column(default=False)


class SamplerRow(Table):
    """A sampling session. `revision` None: the base model itself. `ended` counts its samples that are over, `clients`
    those that joined it."""

    __tablename__ = "samplers"
    __table_args__ = (UniqueConstraint("session_id", "sampling_session_seq_id"),)
    sampler_id: Mapped[str] = mapped_column(String(120), primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.session_id"))
    sampling_session_seq_id: Mapped[int] = mapped_column(BigInteger)
    tenant: Mapped[str] = mapped_column(String(63))
    base: Mapped[str]
    path: Mapped[str | None]
    revision: Mapped[str | None] = mapped_column(String(140), index=True)
    adapter_sha256: Mapped[str | None]
    digest: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float]
    ended: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    clients: Mapped[int] = mapped_column(default=0, server_default="0")


class PathRow(Table):
    """`files` are a training checkpoint's for kind `weights`, and nothing for `sampler_weights`, which has a
    `revision`; `run_id` and `step` say where either comes from."""

    __tablename__ = "paths"
    __table_args__ = (UniqueConstraint("model_id", "kind", "name"),)
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    model_id: Mapped[str] = mapped_column(String(120))
    kind: Mapped[str] = mapped_column(String(16))
    name: Mapped[str] = mapped_column(String(200))
    tenant: Mapped[str] = mapped_column(String(63), index=True)
    base: Mapped[str]
    lora: Mapped[dict[str, Any]]
    train_unembed: Mapped[bool]
    revision: Mapped[str | None] = mapped_column(String(140), index=True)
    run_id: Mapped[str] = mapped_column(String(36))
    step: Mapped[int]
    files: Mapped[dict[str, Any]]
    has_optimizer: Mapped[bool]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]
    expires_at: Mapped[float | None] = mapped_column(index=True)
    published: Mapped[bool] = mapped_column(default=False)


class FileUseRow(Table):
    """`holder` needs the file: a path, a revision, an operation, or a model that starts from it."""

    __tablename__ = "file_uses"
    key: Mapped[str] = mapped_column(String(512), primary_key=True)
    holder: Mapped[str] = mapped_column(String(250), primary_key=True, index=True)
