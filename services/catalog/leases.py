"""The right to work: take, renew, release, with a fencing epoch and time by the catalog's clock.

Invariant: a resource has at most one unexpired lease, and each grant has a higher epoch than every
earlier one of the resource, so that a worker that lost its lease can commit nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from services.catalog import commands, runs
from services.catalog.tables import CommandRow, LeaseRow
from shared.catalog.api import LeaseRequest, OutgoingEvent, RenewAnswer, TakeAnswer, TakeRequest


@dataclass(frozen=True)
class LeaseRules:
    """Seconds, and how often a command may be taken without a commit."""

    ttl_s: float = 30.0
    deadline_s: float = 120.0
    max_takes: int = 5


def take(session: Session, request: TakeRequest, rules: LeaseRules, now: float) -> TakeAnswer:
    row = session.get(CommandRow, request.command_id)
    if row is None:
        return TakeAnswer(status="closed", reason=f"the catalog knows no command {request.command_id}")
    if row.event is not None:
        return TakeAnswer(status="committed", event=OutgoingEvent.model_validate(row.event))
    run = runs.find(session, row.run_id)
    if run is None or run.state not in runs.ACTIVE:
        return TakeAnswer(status="closed", reason=f"the run {row.run_id} is {run.state if run else 'unknown'}")
    if row.state != "open":
        return TakeAnswer(status="closed", reason=f"superseded: the run {row.run_id} needs {row.command_id} no longer")
    lease = session.get(LeaseRow, row.resource)
    if lease is not None and lease.expires_at > now:
        return TakeAnswer(
            status="busy",
            retry_after_s=lease.expires_at - now,
            reason=f"{row.resource} is leased by {lease.worker} for {lease.command_id}",
        )
    if row.takes >= rules.max_takes:
        return TakeAnswer(status="exhausted", reason=commands.exhausted_reason(row, row.takes))
    row.takes += 1
    commands.heard_from(row, now, rules.deadline_s)
    epoch = grant(session, row.resource, row.command_id, request.worker, now + rules.ttl_s)
    return TakeAnswer(status="granted", epoch=epoch)


def grant(session: Session, resource: str, command_id: str, worker: str, expires_at: float) -> int:
    """To `worker`, for `command_id`, whoever had it before. Returns the epoch."""
    lease = session.get(LeaseRow, resource)
    if lease is None:
        lease = LeaseRow(resource=resource, epoch=0, command_id="", worker="", expires_at=0.0)
        session.add(lease)
    lease.epoch += 1
    lease.command_id, lease.worker, lease.expires_at = command_id, worker, expires_at
    session.flush()
    return lease.epoch


def renew(session: Session, request: LeaseRequest, rules: LeaseRules, now: float) -> RenewAnswer:
    """A lease that has expired is lost, even if nobody took it since. Work that the run needs no longer is
    cancelled, not lost: there is no reason to deliver it again."""
    row = session.get(CommandRow, request.command_id)
    if row is None:
        return RenewAnswer(held=False)
    run = runs.find(session, row.run_id)
    if run is None or run.state in runs.ENDED or row.state == "closed":
        return RenewAnswer(held=False, cancelled=True)
    lease = held_lease(session, row, request.worker, request.epoch, now)
    if lease is None or row.state != "open":
        return RenewAnswer(held=False)
    lease.expires_at = now + rules.ttl_s
    commands.heard_from(row, now, rules.deadline_s)
    return RenewAnswer(held=True)


def release(session: Session, request: LeaseRequest, now: float) -> None:
    """Give the lease back at once. Without a `failure` (a shutdown) the take is given back as well."""
    row = session.get(CommandRow, request.command_id)
    if row is None:
        return
    lease = held_lease(session, row, request.worker, request.epoch, now)
    if lease is None:
        return
    lease.expires_at = now
    if request.failure:
        row.failure = request.failure[:1000]
    else:
        row.takes = max(0, row.takes - 1)


def is_held(session: Session, row: CommandRow, now: float) -> bool:
    """Whether some worker works on this command now, as far as its heartbeat tells."""
    lease = session.get(LeaseRow, row.resource)
    return lease is not None and lease.command_id == row.command_id and lease.expires_at > now


def held_lease(session: Session, row: CommandRow, worker: str, epoch: int, now: float) -> LeaseRow | None:
    """The lease of the command's resource, if this worker holds it under this epoch now."""
    lease = lease_of(session, row.resource, worker, epoch, now)
    return lease if lease is not None and lease.command_id == row.command_id else None


def lease_of(session: Session, resource: str, worker: str, epoch: int, now: float) -> LeaseRow | None:
    """The same by the name of the resource, whatever it is held for."""
    lease = session.get(LeaseRow, resource)
    if lease is None or lease.epoch != epoch or lease.worker != worker or lease.expires_at <= now:
        return None
    return lease
