"""Sampling sessions: a base model or one revision, under a name of its own in the client's session.

Invariant: one sampler per (session, number), whatever is retried; what it samples with never changes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sqlalchemy.orm import Session

from services.catalog import outcomes, paths, sessions
from services.catalog.lineage import find_revision
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import ModelRow, OperationRow, SamplerRow
from services.catalog.resolve import resolve as resolve_reference
from services.catalog.tables import RevisionRow
from shared.adapters.layout import canonical_json
from shared.catalog.operations import NewSampler, SamplerJoined, SamplerView
from shared.errors import Refused

__all__ = ["Subject", "find", "for_save", "join", "new_sampler", "show", "subject_of"]


@dataclass(frozen=True)
class Subject:
    """What is sampled with; `revision` None: the base model itself."""

    base: str
    revision: str | None
    adapter_sha256: str | None


def subject_of(
    session: Session, base: str | None, path: str | None, tenant: str | None, rules: OperationRules, now: float
) -> Subject:
    """Raises Refused: 400 for nothing, or for weights that are not exported, 404 for what is not there."""
    if path is not None:
        return _revision_at(session, path, base, tenant, now)
    if base is None:
        raise Refused("name a base model or a path to sample with")
    if base not in rules.bases:
        found = resolve_reference(session, base, rules.bases)
        owner = (found.policy or "").split("/", 1)[0]
        if tenant not in (None, owner):
            raise Refused(f"there is no policy {found.policy}", code="not_found", status=404)
        return Subject(found.base, found.revision, found.adapter_sha256)
    return Subject(base, None, None)


def _revision_at(session: Session, path: str, base: str | None, tenant: str | None, now: float) -> Subject:
    found = paths.resolve(session, path, tenant, now)
    row = find_revision(session, found.revision) if found.revision is not None else None
    if found.kind != "sampler_weights" or row is None:
        raise Refused(f"{path} is a training checkpoint; save_weights_for_sampler makes what can be sampled with")
    if base is not None and base != row.base:
        raise Refused(f"{path} is on base model {row.base}, not {base}")
    return Subject(row.base, row.revision, row.adapter_sha256)


def new_sampler(session: Session, request: NewSampler, rules: OperationRules, now: float) -> SamplerView:
    """The same again: the same sampler. Raises Refused as `subject_of`; 409 for another content under the number, 410
    for a session that is over."""
    outcomes.check_number("sampling_session_seq_id", request.sampling_session_seq_id)
    owner = sessions.find(session, request.session_id, request.tenant, lock=True)
    digest = hashlib.sha256(canonical_json([request.base, request.path])).hexdigest()
    known = session.get(SamplerRow, _name(owner.session_id, request.sampling_session_seq_id))
    if known is not None:
        if known.digest != digest:
            raise _taken(known)
        return _view(known)
    sessions.touch(owner, now)
    subject = subject_of(session, request.base, request.path, owner.tenant, rules, now)
    number = request.sampling_session_seq_id
    row = _add(session, owner.session_id, number, owner.tenant, subject, request.path, digest, now)
    return _view(row)


def for_save(
    session: Session, model: ModelRow, number: int, revision: RevisionRow, save: OperationRow, now: float
) -> str:
    """The sampler of an ephemeral save. Returns its id. Raises Refused where the number is taken by another, or the
    model has no session."""
    if model.session_id is None:
        raise Refused(f"model {model.model_id} has no session, so its saves need names")
    known = session.get(SamplerRow, _name(model.session_id, number))
    if known is not None and (known.digest, known.revision) != (save.digest, revision.revision):
        raise _taken(known)
    if known is None:
        subject = Subject(revision.base, revision.revision, revision.adapter_sha256)
        known = _add(session, model.session_id, number, model.tenant, subject, None, save.digest, now)
    return known.sampler_id


def _name(session_id: str, number: int) -> str:
    return f"{session_id}:sample:{number}"


def _taken(row: SamplerRow) -> Refused:
    message = f"sampling session {row.sampling_session_seq_id} of {row.session_id} exists with another content"
    return Refused(f"{message}; use the next sampling_session_seq_id", code="other_payload", status=409)


def _add(
    session: Session,
    session_id: str,
    number: int,
    tenant: str,
    subject: Subject,
    path: str | None,
    digest: str,
    now: float,
) -> SamplerRow:
    row = SamplerRow(
        sampler_id=_name(session_id, number),
        session_id=session_id,
        sampling_session_seq_id=number,
        tenant=tenant,
        base=subject.base,
        path=path,
        revision=subject.revision,
        adapter_sha256=subject.adapter_sha256,
        digest=digest,
        created_at=now,
    )
    session.add(row)
    session.flush()
    return row


def find(session: Session, sampler_id: str, tenant: str | None) -> SamplerRow:
    """Raises Refused (404), also for another tenant's."""
    row = session.get(SamplerRow, sampler_id)
    if row is None or (tenant is not None and row.tenant != tenant):
        raise Refused(f"there is no sampling session {sampler_id[:120]}", code="not_found", status=404)
    return row


def show(session: Session, sampler_id: str, tenant: str | None) -> SamplerView:
    return _view(find(session, sampler_id, tenant))


def join(session: Session, sampler_id: str, tenant: str | None, now: float) -> SamplerJoined:
    """One more client: the first one that joins is number 1. Raises Refused (404); 410 for a session that is over."""
    find(session, sampler_id, tenant)
    row = session.get_one(SamplerRow, sampler_id, with_for_update=True)
    sessions.touch(sessions.find(session, row.session_id, None, lock=True), now)
    row.clients += 1
    session.flush()
    return SamplerJoined(client=row.clients)


def _view(row: SamplerRow) -> SamplerView:
    return SamplerView(
        sampler_id=row.sampler_id,
        base=row.base,
        path=row.path,
        revision=row.revision,
        adapter_sha256=row.adapter_sha256,
    )
