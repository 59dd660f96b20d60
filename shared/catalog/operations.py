"""The catalog's internal HTTP API for sessions, models and their operations.

| method, path | request | answer |
|---|---|---|
| POST /internal/v1/sessions | NewSession | SessionView |
| POST /internal/v1/sessions/{id}/heartbeat | Caller | SessionHead |
| POST /internal/v1/sessions/{id}/finish | FinishSession | SessionView |
| GET /internal/v1/sessions?tenant=&limit=&offset= | | SessionPage |
| GET /internal/v1/sessions/{id}?tenant= | | SessionView |
| POST /internal/v1/models | NewModel | OperationView |
| GET /internal/v1/models/{model_id}?tenant= | | ModelView |
| GET /internal/v1/models?tenant=&limit=&offset= | | ModelPage |
| POST /internal/v1/operations | Submit | OperationView |
| GET /internal/v1/operations/{request_id}?tenant=&wait_s= | | OperationView |
| POST /internal/v1/operations/{request_id}/cancel | Caller | OperationView |
| POST /internal/v1/operations/take | TakeOperations | OperationsTaken |
| POST /internal/v1/operations/renew | OperationsLease | RenewAnswer |
| POST /internal/v1/operations/release | OperationsLease | {} |
| POST /internal/v1/operations/commit | CommitOperation | OperationView |
| POST /internal/v1/samplers | NewSampler | SamplerView |
| GET /internal/v1/samplers/{id}?tenant= | | SamplerView |
| POST /internal/v1/samplers/{id}/join | Caller | SamplerJoined |
| POST /internal/v1/samplers/{id}/ended | AwaitSamples | SamplesEnded |
| POST /internal/v1/samples | SubmitSample | OperationView |
| POST /internal/v1/samples/take | TakeSample | SampleTaken |
| GET /internal/v1/paths?tenant=&model_id=&limit=&offset= | | PathPage |
| GET /internal/v1/paths/resolve?tenant=&path= | | PathView |
| POST /internal/v1/paths/change | ChangePath | PathView |
| POST /internal/v1/paths/copy | CopyPath | PathView |
| POST /internal/v1/paths/import | ImportPath | OperationView |
| DELETE /internal/v1/paths?tenant=&path= | | {} |

`tenant` None asks for every tenant. What is another tenant's (and not published) is 404. Errors as in `api.py`.
"""

from __future__ import annotations

from typing import Literal

from mint_schemas.commands import CheckpointRef
from mint_schemas.common import FileRef
from mint_schemas.training import Lora
from pydantic import Base64Bytes, Field

from shared.adapters.manifest import Manifest
from shared.catalog.api import Message

OperationKind = Literal[
    "create_model",
    "forward",
    "forward_backward",
    "reverse_kl",
    "optim_step",
    "save_weights",
    "save_sampler_weights",
    "load_weights",
    "unload_model",
    "sample",
    "interpolate",
    "import",
]
OperationState = Literal["queued", "running", "done", "failed"]
Category = Literal["user", "server", "unknown"]


class Caller(Message):
    tenant: str | None = None
    actor: str = ""


class Content(Message):
    """Bytes of `shared.operations.payload`: small ones inline, others as a file that is in the store already."""

    inline: Base64Bytes | None = None
    file: FileRef | None = None


class Failure(Message):
    message: str
    category: Category = "user"


class NewSession(Caller):
    tenant: str
    sdk_version: str = ""
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, str] = Field(default_factory=dict)


class SessionHead(Message):
    session_id: str
    tenant: str
    state: Literal["open", "finished", "expired"]
    created_at: float
    seen_at: float
    sdk_version: str = ""
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, str] = Field(default_factory=dict)


class SessionView(SessionHead):
    """With everything opened in it, which may be a sampler for each step of a long training."""

    model_ids: tuple[str, ...] = ()
    sampler_ids: tuple[str, ...] = ()


class SessionPage(Message):
    items: list[SessionHead]
    total: int


class FinishSession(Caller):
    reason: str = ""


class NewModel(Caller):
    """`model_seq_id` makes it idempotent in its session. `path`: start from there, with its optimizer if asked."""

    session_id: str
    model_seq_id: int
    base: str
    lora: Lora
    seed: int | None = None
    train_unembed: bool = False
    user_metadata: dict[str, str] = Field(default_factory=dict)
    path: str | None = None
    optimizer: bool = False


class ModelView(Message):
    """`run_id` and `policy` are the catalog's names of it."""

    model_id: str
    session_id: str
    tenant: str
    run_id: str
    policy: str
    base: str
    lora: Lora
    train_unembed: bool
    state: Literal["active", "unloaded"]
    step: int
    last_seq_id: int
    created_at: float
    last_request_at: float
    user_metadata: dict[str, str] = Field(default_factory=dict)


class ModelPage(Message):
    items: list[ModelView]
    total: int


class Submit(Caller):
    """One operation of a model. The same (model_id, seq_id) with the same digest is the same operation; with
    another digest a 409. `seq_id` 0: its client numbers it not (mint's reverse KL); it comes directly behind the
    highest number accepted so far, and takes none of the numbers that the client counts on. With a `key`, the same
    (model_id, key) again is the same operation. With a `failure`, what was sent is not allowed: it is stored as
    failed from the start, no worker sees it, and its number is used, so that what comes behind it need not wait."""

    model_id: str
    seq_id: int
    kind: OperationKind
    digest: str
    payload: Content
    key: str = ""
    failure: Failure | None = None


class SubmitSample(Caller):
    sampling_session_id: str | None
    base: str | None = None
    path: str | None = None
    seq_id: int
    digest: str
    payload: Content


class OperationView(Message):
    """`queue`: why it is not done yet, for the client."""

    request_id: str
    kind: OperationKind
    state: OperationState
    model_id: str | None = None
    seq_id: int = 0
    result: Content | None = None
    failure: Failure | None = None
    queue: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    expired: bool = False


class Operation(Message):
    """What a worker does. `reference`: the checkpoint that a load or a reverse KL names, resolved when it was
    accepted; `has_optimizer`: whether it has one."""

    request_id: str
    seq_id: int
    kind: OperationKind
    payload: Content
    reference: CheckpointRef | None = None
    reference_lora: Lora | None = None
    has_optimizer: bool = False


class TakeOperations(Message):
    """`epoch`: of the lease that the worker goes on with. 0: it begins; what it still holds from before its last start
    is granted anew. `holds` names the state that its slot is in: where it is the one granted, the operations of
    `replay` come without their payloads."""

    policy: str
    worker: str
    limit: int = 32
    epoch: int = 0
    holds: str = ""


class OperationsTaken(Message):
    """`granted`: work on `operations` in order, committing each under `epoch`. The state to start from: `start`
    (None: a fresh adapter from `seed`), then the forward_backwards of `replay` (their results stand; only their
    gradients are needed). `state_id` names exactly that state: a slot that holds it needs neither.
    `shared.operations.state` makes these names, so that a learner can follow what its own slot holds. `step`: of the
    last training checkpoint; the next one, of an optim_step or a load, has a higher one, and a save that of the state
    that it saves. `busy`: another learner has the lease; `idle`: nothing to do."""

    status: Literal["granted", "busy", "idle"]
    epoch: int = 0
    retry_after_s: float = 0.0
    run_id: str = ""
    model_id: str = ""
    base: str = ""
    lora: Lora | None = None
    seed: int = 0
    step: int = 0
    start: CheckpointRef | None = None
    fresh_optimizer: bool = True
    state_id: str = ""
    replay: tuple[Operation, ...] = ()
    operations: tuple[Operation, ...] = ()


class OperationsLease(Message):
    """Of a policy, or of a sample: then its `request_id` stands in `policy`, or for itself. `failure` (release only):
    why the attempt gave up; then the take counts."""

    policy: str
    worker: str
    epoch: int
    failure: str = ""
    request_id: str = ""


class CommitOperation(Message):
    """The outcome of one operation: a result or a failure. `checkpoint`: the training checkpoint after it, for what
    changes the adapter or the optimizer (optim_step, load_weights) or names it (saves)."""

    policy: str = ""
    request_id: str
    worker: str
    epoch: int
    result: Content | None = None
    failure: Failure | None = None
    checkpoint: CheckpointRef | None = None
    metrics: dict[str, float] = Field(default_factory=dict)


class NewSampler(Caller):
    session_id: str
    sampling_session_seq_id: int
    base: str | None = None
    path: str | None = None


class SamplerView(Message):
    """`revision` None: the base model itself."""

    sampler_id: str
    base: str
    path: str | None
    revision: str | None
    adapter_sha256: str | None


class SamplerJoined(Message):
    """`client`: its number among the clients that joined, from 1."""

    client: int


class AwaitSamples(Caller):
    """Which samples of a sampler, numbered `first` to `last`, ended behind `after`? `wait_s`: how long to wait for
    one (at most 60)."""

    after: int = Field(default=0, ge=0, lt=2**63)
    first: int = Field(default=0, ge=0, lt=2**63)
    last: int = Field(default=2**63 - 1, ge=0, lt=2**63)
    wait_s: float = Field(default=0.0, ge=0.0, le=60.0)


class EndedSample(Message):
    """`size`: of its result, in bytes."""

    request_id: str
    failed: bool
    size: int | None = None


class SamplesEnded(Message):
    """In the order in which they ended. `cursor`: where to go on, as `after`."""

    items: tuple[EndedSample, ...] = ()
    cursor: int


class TakeSample(Message):
    request_id: str
    worker: str


class SampleTaken(Message):
    status: Literal["granted", "busy", "closed"]
    epoch: int = 0
    retry_after_s: float = 0.0
    tenant: str = ""
    base: str = ""
    revision: str | None = None
    adapter_sha256: str | None = None
    payload: Content | None = None


class PathView(Message):
    """`tinker://<model_id>/<kind>/<name>`: a row that maps to a revision or a training checkpoint."""

    path: str
    model_id: str
    tenant: str
    kind: Literal["weights", "sampler_weights"]
    name: str
    base: str
    lora: Lora
    train_unembed: bool
    revision: str | None
    checkpoint: CheckpointRef | None
    has_optimizer: bool
    size_bytes: int
    created_at: float
    expires_at: float | None
    published: bool


class PathPage(Message):
    items: list[PathView]
    total: int


class ChangePath(Caller):
    """`ttl_s` None leaves it, 0 takes the expiry away."""

    path: str
    published: bool | None = None
    ttl_s: float | None = None


class CopyPath(Caller):
    source: str
    target: str
    overwrite: bool = False


class ImportPath(Caller):
    """A PEFT adapter made elsewhere, or combined from checkpoints, its files in the store and admitted already.

    `files`, all of them blobs: `adapter_model.safetensors` and `adapter_config.json` (the revision's, named by
    `manifest`), `adapter.safetensors` and `state.json` (a training checkpoint without optimizer of the same values;
    a load reads the shape, the base digest and the tensors of it, never its policy, run or step). `manifest`: whole
    but for what the catalog gives: `revision`, `policy`, `run_id` and `step`. `digest` names the request: the same
    tenant, name and digest again is the same operation, another digest under that name a 409. The result is a
    SavedResult with the `tinker://<model_id>/sampler_weights/<name>` path, whose row has the revision and the
    checkpoint, and with `note` as given."""

    session_id: str | None
    base: str
    name: str
    files: dict[str, FileRef]
    manifest: Manifest
    digest: str
    kind: Literal["import", "interpolate"] = "import"
    note: str = ""
