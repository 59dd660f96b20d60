"""Paths: `tinker://<model_id>/<kind>/<name>`, rows that map to a revision or to the files of a training checkpoint.

A run of events has paths too, without rows: its id and the number of a step. Invariant: what is another tenant's and
not published is not found, whatever is asked of it; an expired path is gone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from mint_schemas.commands import CheckpointRef
from mint_schemas.common import FileRef
from mint_schemas.training import Lora
from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from services.catalog import runs
from services.catalog.model_end import TINKER
from services.catalog.operation_tables import PathRow
from services.catalog.retention import OPTIMIZER, lasting
from services.catalog.tables import CheckpointRow, RevisionRow, RunRow
from shared.catalog.operations import PathPage, PathView
from shared.errors import Refused

__all__ = [
    "Kind",
    "PathName",
    "check_fits",
    "check_name",
    "find",
    "list_paths",
    "parse",
    "reference_of",
    "resolve",
    "taken_from",
    "uri",
    "view",
]

Kind = Literal["weights", "sampler_weights"]
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,119}")
_NAME = re.compile(r"[^\s/\\?#%.][^\s/\\?#%]{0,199}")


@dataclass(frozen=True)
class PathName:
    model_id: str
    kind: Kind
    name: str


def uri(model_id: str, kind: str, name: str) -> str:
    return f"tinker://{model_id}/{kind}/{name}"


def parse(text: str) -> PathName:
    """Raises Refused (400), saying what a path is."""
    parts = text.removeprefix("tinker://").split("/")
    fits = text.startswith("tinker://") and len(parts) == 3 and parts[1] in ("weights", "sampler_weights")
    if not fits or not _MODEL.fullmatch(parts[0]) or ".." in parts[0] or not _is_name(parts[2]):
        raise Refused(
            f"{text[:200]!r} is no path; write tinker://<model id>/weights/<name> or "
            "tinker://<model id>/sampler_weights/<name>",
            code="bad_path",
        )
    return PathName(parts[0], cast(Kind, parts[1]), parts[2])


def check_name(name: str) -> None:
    """Raises Refused (400)."""
    if not _is_name(name):
        raise Refused(
            f"{name[:200]!r} cannot be a name: 1 to 200 printable characters, not beginning with '.', without blanks, "
            "'..' and any of / \\ ? # %",
            code="bad_path",
        )


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None and text.isprintable() and ".." not in text


def find(session: Session, named: PathName, now: float, hold: bool = False) -> PathRow | None:
    """Whoever's it is. `hold`: it stays as it is until the transaction ends, by when its files have another use."""
    query = select(PathRow).where(
        PathRow.model_id == named.model_id, PathRow.kind == named.kind, PathRow.name == named.name
    )
    query = query.where(or_(PathRow.expires_at.is_(None), PathRow.expires_at > now))
    return session.scalars(query.with_for_update(read=True) if hold else query).one_or_none()


def resolve(session: Session, text: str, tenant: str | None, now: float, hold: bool = False) -> PathView:
    """The tenant's own or a published one; `hold` as in `find`. Raises Refused: 400 for what is no path, 404 for all
    others."""
    named = parse(text)
    row = find(session, named, now, hold)
    if row is not None and (tenant is None or row.tenant == tenant or row.published):
        return view(session, row)
    found = _of_a_run(session, named, tenant, hold)
    if found is None:
        raise Refused(f"there is no path {text[:400]}", code="not_found", status=404)
    return found


def view(session: Session, row: PathRow) -> PathView:
    if row.kind == "weights":
        checkpoint: CheckpointRef | None = _reference(row.files, row.step)
    else:
        checkpoint = _adapter_of(session, row.run_id, row.step)
    return PathView.model_validate(
        {
            "path": uri(row.model_id, row.kind, row.name),
            "model_id": row.model_id,
            "tenant": row.tenant,
            "kind": row.kind,
            "name": row.name,
            "base": row.base,
            "lora": row.lora,
            "train_unembed": row.train_unembed,
            "revision": row.revision,
            "checkpoint": checkpoint,
            "has_optimizer": row.has_optimizer,
            "size_bytes": row.size_bytes,
            "created_at": row.created_at,
            "expires_at": row.expires_at,
            "published": row.published,
        }
    )


def _reference(files: Mapping[str, Any], step: int) -> CheckpointRef:
    return CheckpointRef(files={name: FileRef.model_validate(ref) for name, ref in files.items()}, step=step)


def _adapter_of(session: Session, run_id: str, step: int) -> CheckpointRef | None:
    """What a revision was exported from, without what only the next step of its own run could use."""
    row = session.get(CheckpointRow, (run_id, step))
    return _reference(lasting(row.files), step) if row is not None else None


def _of_a_run(session: Session, named: PathName, tenant: str | None, hold: bool) -> PathView | None:
    """`tinker://<run id>/weights/<step>`, or `…/sampler_weights/<step>` where the step has a revision."""
    run = runs.find(session, named.model_id)
    if run is None or run.method == TINKER or run.tenant is None or tenant not in (None, run.tenant):
        return None
    if not re.fullmatch(r"[0-9]{1,9}", named.name) or run.lora is None or run.base is None:
        return None
    step = int(named.name)
    checkpoint = session.get(CheckpointRow, (run.run_id, step), with_for_update={"read": True} if hold else None)
    query = select(RevisionRow).where(RevisionRow.run_id == run.run_id, RevisionRow.step == step)
    revision = session.scalars(query).one_or_none()
    if (checkpoint if named.kind == "weights" else revision) is None:
        return None
    return _run_view(run, named, step, checkpoint, revision)


def _run_view(
    run: RunRow, named: PathName, step: int, checkpoint: CheckpointRow | None, revision: RevisionRow | None
) -> PathView:
    weights = named.kind == "weights"
    held = _reference(checkpoint.files if weights else lasting(checkpoint.files), step) if checkpoint else None
    of_files = sum(ref.size for ref in held.files.values()) if held is not None else 0
    return PathView(
        path=uri(named.model_id, named.kind, named.name),
        model_id=named.model_id,
        tenant=run.tenant or "",
        kind=named.kind,
        name=named.name,
        base=run.base or "",
        lora=Lora.model_validate(run.lora),
        train_unembed=False,
        revision=revision.revision if revision is not None else None,
        checkpoint=held,
        has_optimizer=held is not None and OPTIMIZER in held.files,
        size_bytes=revision.adapter_bytes if revision is not None and not weights else of_files,
        created_at=revision.created_at if revision is not None else run.created_at,
        expires_at=None,
        published=False,
    )


def taken_from(checkpoint: CheckpointRef, optimizer: bool) -> CheckpointRef:
    """What a load takes: with the optimizer everything there is, gradients too; without it the adapter."""
    return checkpoint if optimizer else CheckpointRef(files=lasting(checkpoint.files), step=checkpoint.step)


def reference_of(details: Mapping[str, Any]) -> CheckpointRef:
    """The training checkpoint that an operation names, as it was resolved."""
    return CheckpointRef.model_validate(details["reference"])


def check_fits(origin: PathView, base: str, lora: Lora) -> None:
    """Whether a model can be loaded with it. Raises Refused (400)."""
    if origin.checkpoint is None:
        raise Refused(f"{origin.path} has no training checkpoint any more; only its revision is left to sample with")
    if origin.base != base:
        raise Refused(f"{origin.path} is on base model {origin.base}, the model on {base}; they must be equal")
    held, asked = _shape(origin.lora), _shape(lora)
    if held != asked:
        raise Refused(
            f"{origin.path} has lora {_shown(origin.lora)}, the model {_shown(lora)}; they must be equal",
            code="other_lora",
        )


def _shape(lora: Lora) -> tuple[object, ...]:
    return lora.rank, lora.alpha, lora.use_rslora, sorted(lora.target_modules)


def _shown(lora: Lora) -> str:
    return (
        f"rank {lora.rank}, alpha {lora.alpha:g}, rslora {lora.use_rslora}, on {','.join(sorted(lora.target_modules))}"
    )


def list_paths(
    session: Session, tenant: str | None, model_id: str | None, limit: int, offset: int, now: float
) -> PathPage:
    """Newest first; of one model, oldest first."""
    alive = or_(PathRow.expires_at.is_(None), PathRow.expires_at > now)
    query, count = select(PathRow).where(alive), select(func.count()).select_from(PathRow).where(alive)
    for column, value in ((PathRow.tenant, tenant), (PathRow.model_id, model_id)):
        if value is not None:
            query, count = query.where(column == value), count.where(column == value)
    ordered = query.order_by(PathRow.seq.desc() if model_id is None else PathRow.seq)
    rows = session.scalars(ordered.limit(limit).offset(offset)).all()
    return PathPage(items=[view(session, row) for row in rows], total=session.scalar(count) or 0)
