"""Promise messages inside a transaction: outbox rows, and the journal of the run that they belong to.

Invariant: a fact and its message commit together, or neither does. A fact is journalled once, whoever
reports it and however often.
"""

from __future__ import annotations

from typing import Any

from mint_schemas.commands import Command
from mint_schemas.events import RunStateChanged
from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import tracing
from services.catalog.tables import JournalRow, OutboxRow, RunRow
from shared.telemetry.tracing import current_traceparent

SOURCE = "mint/catalog"


def fact(session: Session, run: RunRow, type_: str, fact_id: str, body: BaseModel, now: float) -> None:
    """A fact of a run that the catalog itself publishes. `type_` is without the base token."""
    content = body.model_dump(mode="json")
    message(session, type_, fact_id, run.token, content, now, subject=run.policy, traceparent=run.traceparent)
    journal(session, run.run_id, type_, fact_id, content, now)


def command(session: Session, run: RunRow, body: Command, now: float, replay: int | None = None) -> None:
    type_ = f"mint.v1.{body.kind}.requested"
    content = body.model_dump(mode="json")
    message(session, type_, body.command_id, run.token, content, now, run.policy, run.traceparent, replay)


def message(
    session: Session,
    type_: str,
    fact_id: str,
    token: str,
    body: dict[str, Any],
    now: float,
    subject: str | None = None,
    traceparent: str | None = None,
    replay: int | None = None,
) -> None:
    session.add(
        OutboxRow(
            type=type_,
            ce_id=fact_id,
            token=token,
            subject=subject,
            body=body,
            traceparent=tracing.child_of(traceparent) if traceparent else current_traceparent(),
            replay=replay,
            created_at=now,
        )
    )


def journal(session: Session, run_id: str, type_: str, fact_id: str, body: dict[str, Any], now: float) -> None:
    """A fact that somebody else publishes. A fact that is there already: no-op."""
    session.flush()
    known = select(JournalRow.seq).where(JournalRow.run_id == run_id, JournalRow.fact == f"{type_}|{fact_id}")
    if session.execute(known).first() is None:
        session.add(JournalRow(run_id=run_id, fact=f"{type_}|{fact_id}", type=type_, body=body, at=now))
        session.flush()


def state_changed(session: Session, run: RunRow, previous: str | None, now: float) -> None:
    body = RunStateChanged(
        run_id=run.run_id, policy=run.policy or "", base=run.base or "", state=run.state, previous=previous
    )
    fact(session, run, f"mint.v1.run.{run.state}", f"{run.run_id}:{run.state}", body, now)
