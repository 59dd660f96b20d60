"""Sample operations: accepted, taken by one rollout worker at a time, committed once.

Invariant: a sample is stored before its client hears of it, once per (sampler, number); what it samples with is fixed
when it is accepted.
"""

from __future__ import annotations

import uuid

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from services.catalog import ephemeral, file_uses, outcomes, paths, samplers, sessions, signals
from services.catalog.leases import grant, lease_of
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import OperationRow, SamplerRow
from services.catalog.samplers import Subject
from services.catalog.tables import LeaseRow
from shared.catalog.operations import CommitOperation, OperationView, SampleTaken, SubmitSample, TakeSample
from shared.errors import Refused

__all__ = ["commit", "dead", "submit", "take"]

OPEN = ("queued", "running")


def submit(session: Session, request: SubmitSample, rules: OperationRules, now: float) -> OperationView:
    """Raises Refused: 400, 404 for what is not there, 409 for another content under the number, 410 for a session or
    revision that is over, 429 where the tenant has too many open."""
    sampler = None
    outcomes.check_number("seq_id", request.seq_id)
    if request.sampling_session_id is not None:
        sampler = samplers.find(session, request.sampling_session_id, request.tenant)
        query = select(OperationRow).where(
            OperationRow.sampler_id == sampler.sampler_id, OperationRow.seq_id == request.seq_id
        )
        known = session.scalars(query).one_or_none()
        if known is not None:
            if known.digest != request.digest:
                message = f"sample {request.seq_id} of {sampler.sampler_id} exists with another content"
                raise Refused(f"{message}; number the next one higher", code="other_payload", status=409)
            return outcomes.view(known, now)
        sessions.touch(sessions.find(session, sampler.session_id, None, lock=True), now)
    tenant = sampler.tenant if sampler is not None else request.tenant
    if tenant is None:
        raise Refused("a sample without a sampling session needs a tenant")
    subject = _subject(session, request, sampler, tenant, rules, now)
    _check_backlog(session, tenant, rules)
    row = _add(session, request, sampler, tenant, subject, now)
    signals.sample_waits(session, row, rules, now)
    return outcomes.view(row, now)


def _subject(
    session: Session, request: SubmitSample, sampler: SamplerRow | None, tenant: str, rules: OperationRules, now: float
) -> Subject:
    if sampler is None:
        subject = samplers.subject_of(session, request.base, request.path, tenant, rules, now)
    else:
        subject = Subject(sampler.base, sampler.revision, sampler.adapter_sha256)
        _check_readable(session, sampler, now)
    if subject.base not in rules.bases:
        raise Refused(
            f"base model {subject.base} is not configured any more; known are {', '.join(sorted(rules.bases))}"
        )
    if subject.revision is not None and not ephemeral.touch(session, subject.revision, rules, now):
        raise Refused(f"{subject.revision} has expired; save the weights for sampling again", "expired", status=410)
    return subject


def _check_readable(session: Session, sampler: SamplerRow, now: float) -> None:
    """What another tenant published is sampled with while it is published. Raises Refused (404) then."""
    owner = (sampler.revision or "").partition("/")[0]
    if sampler.path is not None and owner != sampler.tenant:
        paths.resolve(session, sampler.path, sampler.tenant, now)


def _check_backlog(session: Session, tenant: str, rules: OperationRules) -> None:
    waiting = select(func.count()).select_from(OperationRow).where(OperationRow.kind == "sample")
    count = session.scalar(waiting.where(OperationRow.state.in_(OPEN), OperationRow.tenant == tenant)) or 0
    if count >= rules.sample_backlog:
        raise Refused(
            f"{count} samples of {tenant} are open, at most {rules.sample_backlog} may be; wait for results",
            code="too_many_samples",
            status=429,
        )


def _add(
    session: Session, request: SubmitSample, sampler: SamplerRow | None, tenant: str, subject: Subject, now: float
) -> OperationRow:
    row = OperationRow(
        request_id=uuid.uuid4().hex,
        tenant=tenant,
        kind="sample",
        state="queued",
        sampler_id=sampler.sampler_id if sampler is not None else None,
        seq_id=request.seq_id,
        place=0,
        digest=request.digest,
        payload=request.payload.model_dump(mode="json"),
        details={"base": subject.base, "revision": subject.revision, "adapter_sha256": subject.adapter_sha256},
        in_state=False,
        takes=0,
        issues=1,
        accepted_at=now,
        expired=False,
    )
    session.add(row)
    session.flush()
    if request.payload.file is not None:
        file_uses.use(session, outcomes.use_of(row), [request.payload.file])
    return row


def _find(session: Session, request_id: str) -> OperationRow | None:
    query = select(OperationRow).where(OperationRow.request_id == request_id, OperationRow.kind == "sample")
    return session.scalars(query.with_for_update()).one_or_none()


def take(session: Session, request: TakeSample, rules: OperationRules, now: float) -> SampleTaken:
    row = _find(session, request.request_id)
    if row is None or row.done_at is not None:
        return SampleTaken(status="closed")
    lease = session.get(LeaseRow, signals.sample_resource(row.request_id))
    if lease is not None and lease.expires_at > now:
        return SampleTaken(status="busy", retry_after_s=lease.expires_at - now)
    if row.takes >= rules.max_takes:
        said = f"; the last attempt said: {row.details['failure']}" if row.details.get("failure") else ""
        outcomes.fail(session, row, f"the sample was taken {row.takes} times without a result{said}", "server", now)
        return SampleTaken(status="closed")
    row.takes += 1
    row.state = "running"
    resource = signals.sample_resource(row.request_id)
    return SampleTaken.model_validate(
        {
            "status": "granted",
            "epoch": grant(session, resource, row.request_id, request.worker, now + rules.lease_ttl_s),
            "tenant": row.tenant,
            "base": row.details["base"],
            "revision": row.details["revision"],
            "adapter_sha256": row.details["adapter_sha256"],
            "payload": row.payload,
        }
    )


def dead(session: Session, request_id: str, reason: str, now: float) -> None:
    """No worker can do it. One that is over, or is worked on now, is left alone."""
    row = _find(session, request_id)
    lease = session.get(LeaseRow, signals.sample_resource(request_id))
    if row is not None and (lease is None or lease.expires_at <= now):
        outcomes.fail(session, row, f"it could not be sampled: {reason}", "server", now)


def commit(session: Session, row: OperationRow, request: CommitOperation, now: float) -> OperationView:
    """Of one that is not over. Raises Refused (409, `stale_epoch`)."""
    resource = signals.sample_resource(row.request_id)
    if lease_of(session, resource, request.worker, request.epoch, now) is None:
        message = f"worker {request.worker} does not hold {resource} under epoch {request.epoch}"
        raise Refused(message, code="stale_epoch", status=409)
    if request.failure is not None:
        outcomes.fail(session, row, request.failure.message, request.failure.category, now)
    elif request.result is not None:
        outcomes.finish(session, row, request.result, now)
    else:
        raise Refused(f"the commit of {row.request_id} has neither a result nor a failure")
    return outcomes.view(row, now)
