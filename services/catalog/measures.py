"""The catalog's gauges, read from the database: runs by state, and what the outbox still owes the bus."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from services.catalog import runs
from services.catalog.tables import OutboxRow, RunRow
from shared.telemetry.metrics import OUTBOX_WAITING, RUNS


def measure(session: Session) -> None:
    counted = dict.fromkeys(("queued", *runs.ACTIVE, *runs.ENDED), 0)
    for state, count in session.execute(select(RunRow.state, func.count()).group_by(RunRow.state)).all():
        counted[state] = count
    for state, count in counted.items():
        RUNS.labels(state).set(count)
    waiting = select(func.count()).select_from(OutboxRow).where(OutboxRow.published_at.is_(None))
    OUTBOX_WAITING.set(session.scalar(waiting) or 0)
