"""The names of a model, and the policy and run that it is.

Invariant: names follow from the model's id alone, so that a retry finds what is there.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from mint_schemas.cloudevents import run_id_for
from mint_schemas.training import Lora
from sqlalchemy.orm import Session

from services.catalog import runs, tracing
from services.catalog.model_end import TINKER
from services.catalog.tables import PolicyRow, RunRow
from shared.bases import Base

__all__ = ["Names", "add_run", "names_of"]


@dataclass(frozen=True)
class Names:
    model_id: str
    run_id: str
    policy: str


def names_of(model_id: str, tenant: str) -> Names:
    digest = hashlib.sha256(model_id.encode()).hexdigest()[:12]
    return Names(model_id, run_id_for("tinker", model_id), f"{tenant}/tinker-{digest}")


def add_run(
    session: Session, names: Names, tenant: str, base: Base, lora: Lora, request: dict[str, Any], now: float
) -> RunRow:
    """The policy and the run of a model, running."""
    session.add(PolicyRow(policy=names.policy, tenant=tenant, base=base.name, created_at=now, last_number=0))
    run = RunRow(
        run_id=names.run_id,
        policy=names.policy,
        tenant=tenant,
        active_policy=names.policy,
        base=base.name,
        token=base.token,
        state="queued",
        method=TINKER,
        steps=0,
        outcome="",
        request=request,
        request_source="tinker",
        request_id=names.model_id,
        traceparent=tracing.for_run(None),
        created_at=now,
        started_at=now,
        lora=lora.model_dump(mode="json"),
        promoted=False,
    )
    session.add(run)
    session.flush()
    runs.enter(session, run, "running", now)
    return run
