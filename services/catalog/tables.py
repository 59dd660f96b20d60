"""The catalog's tables. Other modules query them; only `migrations/` creates or changes them.

Conventions: `*_at` are seconds since the epoch by the catalog's clock; JSON columns hold contract bodies
as published. Invariant: a file exists for the system only while a row of `files` names it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Float,
    ForeignKey,
    Index,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

__all__ = [
    "AliasMoveRow",
    "AliasRow",
    "CheckpointRow",
    "CommandRow",
    "DataRow",
    "EvaluationRow",
    "FileRow",
    "JournalRow",
    "KeyRow",
    "LeaseRow",
    "OutboxRow",
    "PolicyRow",
    "PrewarmRow",
    "RevisionRow",
    "RunRow",
    "Table",
]

_NAMING = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}


class Table(DeclarativeBase):
    metadata = MetaData(naming_convention=_NAMING)
    type_annotation_map: ClassVar[dict[Any, Any]] = {dict[str, Any]: JSON, float: Float(53), str: Text()}


class PolicyRow(Table):
    """`last_number` is the highest revision number allocated so far; `pinned`: what its aliases point at stays
    resident."""

    __tablename__ = "policies"
    policy: Mapped[str] = mapped_column(String(127), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(63), index=True)
    base: Mapped[str]
    created_at: Mapped[float]
    last_number: Mapped[int] = mapped_column(default=0)
    pinned: Mapped[bool] = mapped_column(default=False, server_default=false())
    __table_args__ = (
        Index("ix_policies_pinned", "policy", sqlite_where=text("pinned"), postgresql_where=text("pinned")),
    )


class RunRow(Table):
    """`seq` is the order of arrival. `parent`, `alias_version` and `lora` are set when the run becomes
    active; `active_policy` is the policy while the run is active, so that a policy has one active run.
    `picked`: the revision that a completed run stands for."""

    __tablename__ = "runs"
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(String(36), unique=True)
    policy: Mapped[str | None] = mapped_column(String(127), index=True)
    tenant: Mapped[str | None] = mapped_column(String(63), index=True)
    active_policy: Mapped[str | None] = mapped_column(String(127), unique=True)
    base: Mapped[str | None]
    token: Mapped[str]
    state: Mapped[str] = mapped_column(String(16), index=True)
    method: Mapped[str | None]
    steps: Mapped[int] = mapped_column(default=0)
    outcome: Mapped[str] = mapped_column(default="")
    request: Mapped[dict[str, Any]]
    request_source: Mapped[str]
    request_id: Mapped[str]
    traceparent: Mapped[str]
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    waiting_since: Mapped[float | None]
    waiting_for: Mapped[str | None]
    parent: Mapped[str | None]
    alias_version: Mapped[int | None]
    lora: Mapped[dict[str, Any] | None]
    task_sha256: Mapped[str | None]
    scorer: Mapped[str | None]
    promoted: Mapped[bool] = mapped_column(default=False)
    picked: Mapped[str | None]


class CommandRow(Table):
    """`takes` counts the takes that were neither committed nor given back. `failure` is why the latest
    attempt gave up, if it said so."""

    __tablename__ = "commands"
    command_id: Mapped[str] = mapped_column(String(200), primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    step: Mapped[int]
    token: Mapped[str]
    resource: Mapped[str]
    state: Mapped[str] = mapped_column(String(16))
    body: Mapped[dict[str, Any]]
    takes: Mapped[int] = mapped_column(default=0)
    issues: Mapped[int] = mapped_column(default=1)
    issued_at: Mapped[float]
    deadline_at: Mapped[float]
    failure: Mapped[str] = mapped_column(default="")
    result: Mapped[dict[str, Any] | None]
    event: Mapped[dict[str, Any] | None]
    committed_at: Mapped[float | None]


class LeaseRow(Table):
    """`epoch` only grows; a holder with an older one can commit nothing."""

    __tablename__ = "leases"
    resource: Mapped[str] = mapped_column(String(200), primary_key=True)
    epoch: Mapped[int]
    command_id: Mapped[str]
    worker: Mapped[str]
    expires_at: Mapped[float]


class CheckpointRow(Table):
    """A committed training checkpoint. `files` shrinks when retention drops its optimizer."""

    __tablename__ = "checkpoints"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(String(127), index=True)
    files: Mapped[dict[str, Any]]
    has_optimizer: Mapped[bool]


class RevisionRow(Table):
    """`ephemeral`: to sample with for a while, until `expires_at`; never aliased, and hidden from lists."""

    __tablename__ = "revisions"
    __table_args__ = (UniqueConstraint("policy", "number"), UniqueConstraint("run_id", "step"))
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    revision: Mapped[str] = mapped_column(String(140), unique=True)
    policy: Mapped[str] = mapped_column(ForeignKey("policies.policy"))
    number: Mapped[int]
    base: Mapped[str]
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"))
    step: Mapped[int]
    export_command: Mapped[str] = mapped_column(String(200), unique=True)
    parent: Mapped[str | None]
    adapter_sha256: Mapped[str]
    adapter_bytes: Mapped[int] = mapped_column(BigInteger)
    zero_delta: Mapped[bool]
    manifest: Mapped[dict[str, Any]]
    created_at: Mapped[float]
    ephemeral: Mapped[bool] = mapped_column(default=False)
    expires_at: Mapped[float | None] = mapped_column(index=True)


class AliasRow(Table):
    """`base` is the policy's, `moved` the `seq` of the move that holds. The indexes give the policies that have
    an alias, in order of their names, and the aliases of a base, in order of their last moves."""

    __tablename__ = "aliases"
    __table_args__ = (Index("ix_aliases_alias", "alias", "policy"), Index("ix_aliases_moved", "base", "moved"))
    policy: Mapped[str] = mapped_column(ForeignKey("policies.policy"), primary_key=True)
    alias: Mapped[str] = mapped_column(String(63), primary_key=True)
    revision: Mapped[str] = mapped_column(ForeignKey("revisions.revision"))
    previous: Mapped[str | None]
    version: Mapped[int]
    base: Mapped[str] = mapped_column(server_default="")
    moved: Mapped[int] = mapped_column(default=0, server_default="0")


class AliasMoveRow(Table):
    """The audit trail: never updated, never deleted."""

    __tablename__ = "alias_moves"
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    policy: Mapped[str] = mapped_column(String(127))
    alias: Mapped[str] = mapped_column(String(63))
    version: Mapped[int]
    revision: Mapped[str]
    previous: Mapped[str | None]
    reason: Mapped[str]
    actor: Mapped[str]
    run_id: Mapped[str | None]
    at: Mapped[float]
    __table_args__ = (UniqueConstraint("policy", "alias", "version"),)


class EvaluationRow(Table):
    """`score_key` names everything that a score depends on (see evaluations.py)."""

    __tablename__ = "evaluations"
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    score_key: Mapped[str] = mapped_column(String(64), unique=True)
    command_id: Mapped[str] = mapped_column(String(200), unique=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), index=True)
    policy: Mapped[str]
    base: Mapped[str]
    revision: Mapped[str | None] = mapped_column(String(140), index=True)
    adapter_sha256: Mapped[str | None]
    task_sha256: Mapped[str]
    scorer: Mapped[str]
    sampling: Mapped[dict[str, Any]]
    items: Mapped[int]
    score: Mapped[float]
    details: Mapped[dict[str, Any]]
    created_at: Mapped[float]


class FileRow(Table):
    """A file that a committed row names; `owner` is the command or tenant that it came from."""

    __tablename__ = "files"
    key: Mapped[str] = mapped_column(String(512), primary_key=True)
    sha256: Mapped[str]
    size: Mapped[int] = mapped_column(BigInteger)
    owner: Mapped[str]


class DataRow(Table):
    __tablename__ = "data"
    tenant: Mapped[str] = mapped_column(String(63), primary_key=True)
    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    key: Mapped[str]
    size: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]


class KeyRow(Table):
    """An API key, by the sha256 of its text. `revoked_at` ends it; the row stays, for the audit trail."""

    __tablename__ = "keys"
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    key_id: Mapped[str] = mapped_column(String(16), unique=True)
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(63), index=True)
    label: Mapped[str]
    kind: Mapped[str] = mapped_column(String(8))
    created_at: Mapped[float]
    created_by: Mapped[str]
    revoked_at: Mapped[float | None]
    revoked_by: Mapped[str | None]


class PrewarmRow(Table):
    """A revision that an alias move waits for, until the move's time-out."""

    __tablename__ = "prewarms"
    revision: Mapped[str] = mapped_column(String(140), primary_key=True)
    until: Mapped[float]


class OutboxRow(Table):
    """A message that a committed transaction promised. Published in order of `seq`."""

    __tablename__ = "outbox"
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    type: Mapped[str]
    ce_id: Mapped[str]
    token: Mapped[str]
    subject: Mapped[str | None]
    body: Mapped[dict[str, Any]]
    traceparent: Mapped[str | None]
    replay: Mapped[int | None]
    created_at: Mapped[float]
    published_at: Mapped[float | None]
    __table_args__ = (Index("ix_outbox_unpublished", "published_at", "seq"),)


class JournalRow(Table):
    """Each fact of a run, once, in order."""

    __tablename__ = "journal"
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), index=True)
    fact: Mapped[str]
    type: Mapped[str]
    body: Mapped[dict[str, Any]]
    at: Mapped[float]
    __table_args__ = (UniqueConstraint("run_id", "fact"),)
