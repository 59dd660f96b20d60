"""The catalog's internal HTTP API: the messages between it and every other service.

Workers: take → renew … → commit (or release, on shutdown). A commit is one transaction, conditional
on the lease epoch, on the previous step and on the run being active; it answers with the event that
won, and the worker publishes what the answer says, never its local result.

| method, path | request | answer |
|---|---|---|
| POST /internal/v1/commands/take | TakeRequest | TakeAnswer |
| POST /internal/v1/commands/renew | LeaseRequest | RenewAnswer |
| POST /internal/v1/commands/release | LeaseRequest | {} |
| POST /internal/v1/commands/commit | CommitRequest | CommitAnswer |
| GET /internal/v1/resolve?reference= | | ResolvedRevision |
| GET /internal/v1/revisions/{tenant}/{policy}/{number} | | RevisionView |
| POST /internal/v1/runs/validate | ValidateRequest | ValidateAnswer |
| GET /internal/v1/runs?tenant=&policy=&state=&limit=&cursor= | | Page of RunView |
| GET /internal/v1/runs/{run_id} | | RunView |
| GET /internal/v1/runs/{run_id}/journal?after= | | list of JournalEntry |
| POST /internal/v1/runs/{run_id}/cancel | CancelRequest | RunView |
| GET /internal/v1/policies?tenant=&limit=&cursor= | | Page of PolicyView |
| GET /internal/v1/policies/{tenant}/{policy} | | PolicyView |
| GET /internal/v1/policies/{tenant}/{policy}/revisions?limit=&cursor= | | Page of RevisionView |
| GET /internal/v1/policies/{tenant}/{policy}/moves | | list of AliasMove |
| POST /internal/v1/policies/{tenant}/{policy}/aliases/{alias} | MoveAlias | AliasView |
| POST /internal/v1/policies/{tenant}/{policy}/rollback | Rollback | AliasView |
| POST /internal/v1/policies/{tenant}/{policy}/pin | PinPolicy | PolicyView |
| GET /internal/v1/evaluations?run_id=&revision= | | list of EvaluationView |
| POST /internal/v1/evaluations | StartEvaluation | RunView of a run that only scores |
| POST /internal/v1/data | FileRef + tenant | FileRef |
| GET /internal/v1/data/{tenant}?limit=&cursor= | | Page of DataView |
| GET /internal/v1/data/{tenant}/{sha256} | | FileRef |

Errors are `{"error": {"code", "message", "near"?}}` with 400 (what is allowed), 404, 409 (a condition
did not hold) or 503 (try again).
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from mint_schemas.commands import CheckpointRef
from mint_schemas.common import FileRef
from mint_schemas.training import Evaluation
from pydantic import BaseModel, ConfigDict, Field

from shared.adapters.manifest import Manifest

T = TypeVar("T")


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TakeRequest(Message):
    command_id: str
    worker: str


class TakeAnswer(Message):
    """`granted`: do it under `epoch`. `committed`: it is done, publish `event`. `busy`: another holds
    the lease, come back in `retry_after_s`. `closed`: the run is over or the command is superseded,
    drop it. `exhausted`: taken too often without a commit, dead-letter it with `reason`."""

    status: Literal["granted", "committed", "busy", "closed", "exhausted"]
    epoch: int = 0
    retry_after_s: float = 0.0
    reason: str = ""
    event: OutgoingEvent | None = None


class LeaseRequest(Message):
    """`failure` (release only): why the attempt gave up; then the take counts. Empty = a shutdown, and the
    take is given back."""

    command_id: str
    worker: str
    epoch: int
    failure: str = ""


class RenewAnswer(Message):
    """`held` false: the lease was lost or the run ended (`cancelled`); stop, nothing will be accepted."""

    held: bool
    cancelled: bool = False


class RolloutResult(Message):
    kind: Literal["rollout"] = "rollout"
    record: FileRef
    revision: str | None
    adapter_sha256: str | None
    groups: int
    trajectories: int
    tokens: int
    reward_mean: float
    seconds: float


class UpdateResult(Message):
    kind: Literal["update"] = "update"
    checkpoint: CheckpointRef
    adapter_changed: bool
    skipped: bool = False
    metrics: dict[str, float]
    seconds: float


class ExportResult(Message):
    kind: Literal["export"] = "export"
    manifest: FileRef
    content: Manifest = Field(description="the manifest itself; its files are registered with the row")
    seconds: float


class EvaluationResult(Message):
    kind: Literal["evaluation"] = "evaluation"
    revision: str | None
    adapter_sha256: str | None
    task_sha256: str
    scorer: str
    sampling: dict[str, float]
    items: int
    score: float
    details: FileRef
    seconds: float


Result = Annotated[RolloutResult | UpdateResult | ExportResult | EvaluationResult, Field(discriminator="kind")]


class CommitRequest(Message):
    command_id: str
    worker: str
    epoch: int
    result: Result


class OutgoingEvent(Message):
    """What to publish, exactly: the type without the base token, the ce-id, the base token, the body."""

    type: str
    id: str
    token: str
    subject: str | None = None
    body: dict[str, Any]


class CommitAnswer(Message):
    """`won`: this commit or an earlier one of the same command; `event` is what to publish either way.
    A refused commit is a 409 whose code is `stale_epoch`, `run_ended` or `wrong_step`."""

    event: OutgoingEvent


class RevisionView(Message):
    revision: str
    number: int
    policy: str
    base: str
    run_id: str
    step: int
    parent: str | None
    adapter_sha256: str
    adapter_bytes: int
    zero_delta: bool
    created_at: str
    aliases: tuple[str, ...]
    manifest: Manifest
    ready_on: tuple[str, ...] = ()
    score: float | None = None


class ResolvedRevision(Message):
    """What a reference means now: a revision, or (for a base name) the base model itself."""

    reference: str
    base: str
    revision: str | None
    adapter_sha256: str | None
    policy: str | None
    alias: str | None
    alias_version: int | None


class AliasView(Message):
    policy: str
    alias: str
    revision: str
    version: int
    previous: str | None


class AliasMove(Message):
    policy: str
    alias: str
    version: int
    revision: str
    previous: str | None
    reason: str
    actor: str
    run_id: str | None
    at: str


class PolicyView(Message):
    policy: str
    tenant: str
    base: str
    created_at: str
    revisions: int
    aliases: dict[str, str]
    active_run: str | None
    pinned: bool = False


class RunView(Message):
    """`revision`: the one that the run stands for: the one that it picked, else its last so far."""

    run_id: str
    policy: str | None
    base: str | None
    state: Literal["queued", "running", "evaluating", "promoting", "completed", "failed", "cancelled"]
    method: str | None
    step: int
    steps: int
    outcome: str
    created_at: str
    started_at: str | None
    ended_at: str | None
    revision: str | None
    promoted: bool
    request_source: str
    request_id: str
    traceparent: str | None
    request: dict[str, Any]


class JournalEntry(Message):
    """One fact of a run, in order: an event of the run, with its body."""

    seq: int
    at: str
    type: str
    body: dict[str, Any]


class StartEvaluation(Message):
    """Score what `reference` means now, beside whatever trains its policy. `key`: asked again under it, the same run
    answers; one of the tenant's own choice never names another's."""

    reference: str
    evaluation: Evaluation
    key: str = Field(min_length=1, max_length=300)
    actor: str


class EvaluationView(Message):
    evaluation_id: str
    run_id: str
    policy: str
    base: str
    revision: str | None
    adapter_sha256: str | None
    task_sha256: str
    scorer: str
    sampling: dict[str, float]
    items: int
    score: float
    details: FileRef
    created_at: str


class Page(Message, Generic[T]):
    items: list[T]
    next_cursor: str | None = None


class ValidateRequest(Message):
    """`request` is the TrainRequested body as sent; validation reports in words, never by a code alone."""

    request: dict[str, Any]
    tenant: str | None = Field(None, description="the caller's tenant; None = all tenants")


class ValidateAnswer(Message):
    ok: bool
    errors: list[str] = []
    resolved: dict[str, Any] = Field({}, description="defaults filled in, parent resolved, data sizes")


class MoveAlias(Message):
    """Compare and set. `expected_version` None = whatever holds now (still one transaction). `force`: at once,
    ready or not; requests then wait for the load."""

    revision: str
    actor: str
    reason: str = "manual"
    expected_version: int | None = None
    timeout_s: float = 60.0
    force: bool = False


class Rollback(Message):
    """Back to `to` (a revision), else to the one that the alias pointed at before its current one."""

    actor: str
    alias: str = "live"
    to: str | None = None
    timeout_s: float = 60.0
    force: bool = False


class PinPolicy(Message):
    """Whether what the policy's aliases point at stays resident on every replica of its base."""

    pinned: bool


class CancelRequest(Message):
    actor: str
    reason: str = "cancelled by request"


class DataView(Message):
    """A tenant's own uploaded file: its reference, as a request names it, and when it came."""

    key: str
    sha256: str
    size: int
    created_at: str


class ErrorBody(Message):
    code: str
    message: str
    near: list[str] = []


TakeAnswer.model_rebuild()
