"""Naming, publishing, copying and taking away paths.

Invariants: a taken name is moved only where that is asked for, and moving it changes neither what it named nor what it
names now; a path keeps its files and its revision while it is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mint_schemas.common import FileRef
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import ephemeral, file_uses, models, paths
from services.catalog.lineage import find_revision
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import PathRow
from services.catalog.retention import OPTIMIZER
from services.catalog.tables import RevisionRow
from shared.catalog.operations import ChangePath, CopyPath, PathView
from shared.errors import Refused

__all__ = ["Named", "change", "copy", "delete", "is_taken", "put", "remove_expired"]


@dataclass(frozen=True)
class Named:
    """What a path is to name: `files` of a training checkpoint, or a `revision`."""

    run_id: str
    step: int
    lora: dict[str, object]
    train_unembed: bool
    files: dict[str, FileRef]
    revision: RevisionRow | None = None

    @property
    def size_bytes(self) -> int:
        if self.revision is not None:
            return self.revision.adapter_bytes
        return sum(ref.size for ref in self.files.values())


def is_taken(session: Session, named: paths.PathName, now: float) -> str | None:
    """Why it cannot be had without overwriting; None: it is free."""
    if paths.find(session, named, now) is None:
        return None
    text = paths.uri(named.model_id, named.kind, named.name)
    return f"{text} exists already; choose another name, or save with overwrite"


def put(
    session: Session,
    at: paths.PathName,
    tenant: str,
    base: str,
    what: Named,
    ttl_s: float | None,
    rules: OperationRules,
    now: float,
) -> PathRow:
    """Whatever it named before; a revision that it named stays what it is. One that expired is gone, also where
    no look has taken it away yet."""
    query = select(PathRow).where(PathRow.model_id == at.model_id, PathRow.kind == at.kind, PathRow.name == at.name)
    row = session.scalars(query).one_or_none()
    if row is None:
        row = PathRow(model_id=at.model_id, kind=at.kind, name=at.name, tenant=tenant, published=False)
    expired = row.expires_at is not None and row.expires_at <= now
    former = row.revision if expired else None
    row.published = row.published and not expired
    row.base, row.lora, row.train_unembed = base, dict(what.lora), what.train_unembed
    row.revision = what.revision.revision if what.revision is not None else None
    row.run_id, row.step = what.run_id, what.step
    row.files = {name: ref.model_dump(mode="json") for name, ref in what.files.items()}
    row.has_optimizer = OPTIMIZER in what.files
    row.size_bytes, row.created_at = what.size_bytes, now
    row.expires_at = now + ttl_s if ttl_s else None
    session.add(row)
    session.flush()
    file_uses.name(session, what.files.values(), paths.uri(at.model_id, at.kind, at.name))
    _hold(session, row, what.files.values())
    if what.revision is not None:
        ephemeral.keep(what.revision)
    if former is not None:
        ephemeral.let_go(session, former, rules, now)
    return row


def _hold(session: Session, row: PathRow, refs: Iterable[FileRef]) -> None:
    """The new files first, so that one that stays is never without a use."""
    holder = f"path:{row.seq}"
    file_uses.use(session, f"{holder}:new", refs)
    file_uses.drop(session, holder)
    file_uses.use(session, holder, refs)
    file_uses.drop(session, f"{holder}:new")


def _own(session: Session, text: str, tenant: str | None, now: float) -> PathRow:
    """Raises Refused (404), also for one that another tenant has published."""
    row = paths.find(session, paths.parse(text), now)
    if row is None or (tenant is not None and row.tenant != tenant):
        raise Refused(f"there is no path {text[:400]} of yours", code="not_found", status=404)
    return row


def change(session: Session, request: ChangePath, now: float) -> PathView:
    row = _own(session, request.path, request.tenant, now)
    if request.published is not None:
        row.published = request.published
    if request.ttl_s is not None:
        if request.ttl_s < 0:
            raise Refused(f"ttl {request.ttl_s:g} s is below 0; 0 takes the expiry away")
        row.expires_at = now + request.ttl_s if request.ttl_s else None
    session.flush()
    return paths.view(session, row)


def copy(session: Session, request: CopyPath, rules: OperationRules, now: float) -> PathView:
    """The tenant's own or a published one, under a path of a model of the tenant. Raises Refused: 404 for either that
    is not there, 409 for a taken name."""
    source = paths.resolve(session, request.source, request.tenant, now, hold=True)
    target = paths.parse(request.target)
    model = models.find(session, target.model_id, request.tenant)
    if source.kind != target.kind:
        raise Refused(
            f"{request.source} is of kind {source.kind}, {request.target} of kind {target.kind}; they must be equal"
        )
    taken = None if request.overwrite else is_taken(session, target, now)
    if taken is not None:
        raise Refused(taken, code="path_taken", status=409)
    revision = find_revision(session, source.revision) if source.revision is not None else None
    origin = paths.find(session, paths.parse(request.source), now)
    files = source.checkpoint.files if source.kind == "weights" and source.checkpoint is not None else {}
    what = Named(
        run_id=origin.run_id if origin is not None else source.model_id,
        step=origin.step if origin is not None else int(source.name),
        lora=source.lora.model_dump(mode="json"),
        train_unembed=source.train_unembed,
        files=files,
        revision=revision if source.kind == "sampler_weights" else None,
    )
    return paths.view(session, put(session, target, model.tenant, source.base, what, None, rules, now))


def delete(session: Session, text: str, tenant: str | None, rules: OperationRules, now: float) -> None:
    _remove(session, _own(session, text, tenant, now), rules, now)


def remove_expired(session: Session, rules: OperationRules, now: float) -> int:
    rows = session.scalars(select(PathRow).where(PathRow.expires_at <= now)).all()
    for row in rows:
        _remove(session, row, rules, now)
    return len(rows)


def _remove(session: Session, row: PathRow, rules: OperationRules, now: float) -> None:
    revision, holder = row.revision, f"path:{row.seq}"
    session.delete(row)
    session.flush()
    file_uses.drop(session, holder)
    if revision is not None:
        ephemeral.let_go(session, revision, rules, now)
