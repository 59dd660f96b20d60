"""What the gateway needs of the parts around it, as protocols: the catalog, the bus, the replicas.

The real ones are `shared.catalog.client`, `shared.bus` and `shared.sampling`; tests put small ones in
their place. Invariant: nothing in the gateway's logic knows more of them than stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mint_schemas.common import FileRef
from pydantic import BaseModel

from shared.catalog.api import (
    AliasMove,
    AliasView,
    CancelRequest,
    DataView,
    EvaluationView,
    JournalEntry,
    MoveAlias,
    Page,
    PinPolicy,
    PolicyView,
    ResolvedRevision,
    RevisionView,
    Rollback,
    RunView,
    StartEvaluation,
    ValidateAnswer,
    ValidateRequest,
)
from shared.residency import Replica

__all__ = ["Catalog", "Publisher", "Replicas", "Tiers"]


class Catalog(Protocol):
    """Raises Refused (with the catalog's status and near matches) and Retryable when it does not answer."""

    async def resolve(self, reference: str) -> ResolvedRevision: ...
    async def revision(self, reference: str) -> RevisionView: ...
    async def validate(self, request: ValidateRequest) -> ValidateAnswer: ...
    async def runs(
        self,
        tenant: str | None = None,
        policy: str | None = None,
        state: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[RunView]: ...
    async def run(self, run_id: str) -> RunView: ...
    async def journal(self, run_id: str, after: int = 0) -> list[JournalEntry]: ...
    async def cancel(self, run_id: str, request: CancelRequest) -> RunView: ...
    async def policies(
        self,
        tenant: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        alias: str | None = None,
        after: str | None = None,
    ) -> Page[PolicyView]: ...
    async def policy(self, name: str) -> PolicyView: ...
    async def revisions(self, policy: str, limit: int = 50, cursor: str | None = None) -> Page[RevisionView]: ...
    async def moves(self, policy: str) -> list[AliasMove]: ...
    async def move_alias(self, policy: str, alias: str, request: MoveAlias) -> AliasView: ...
    async def rollback(self, policy: str, request: Rollback) -> AliasView: ...
    async def pin(self, policy: str, request: PinPolicy) -> PolicyView: ...
    async def evaluate(self, request: StartEvaluation) -> RunView: ...
    async def evaluations(self, run_id: str | None = None, revision: str | None = None) -> list[EvaluationView]: ...
    async def register_data(self, tenant: str, file: FileRef) -> FileRef: ...
    async def list_data(self, tenant: str, limit: int = 50, cursor: str | None = None) -> Page[DataView]: ...


class Publisher(Protocol):
    async def publish(
        self,
        type: str,
        id: str,
        source: str,
        token: str,
        body: BaseModel | Mapping[str, Any],
        subject: str | None = None,
        traceparent: str | None = None,
    ) -> object:
        """Returns once the bus has stored the event. Raises Retryable when it did not."""
        ...


class Replicas(Protocol):
    def replicas(self, base: str | None = None) -> list[Replica]:
        """The serving replicas alive now."""
        ...


class Tiers(Protocol):
    async def residency(self, base: str | None = None) -> list[dict[str, Any]]:
        """Where each serving replica's adapters are now, tier by tier, in the replica's own words."""
        ...
