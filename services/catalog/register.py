"""Registration: a committed export becomes a revision with a number of its own.

Invariant: numbers are allocated in the registering transaction, gap-free per policy; one export is one
revision, however often it is registered.
"""

from __future__ import annotations

from mint_schemas.events import RevisionRegistered
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import commands, emit, ephemeral, file_uses, orders
from services.catalog.tables import CommandRow, PolicyRow, RevisionRow, RunRow
from shared.adapters.manifest import Manifest
from shared.catalog.api import ExportResult
from shared.errors import Fatal


def register(session: Session, run: RunRow, step: int, now: float) -> RevisionRow:
    """The revision of the committed export of `step`. Raises Fatal if there is no such export."""
    export = session.get(CommandRow, commands.command_id(run.run_id, "export", step))
    if export is None or export.result is None:
        raise Fatal(f"run {run.run_id} has no committed export of step {step}")
    known = select(RevisionRow).where(RevisionRow.export_command == export.command_id)
    existing = session.scalars(known).one_or_none()
    if existing is not None:
        return existing
    manifest = ExportResult.model_validate(export.result).content
    return add_revision(session, run, step, manifest, export.command_id, orders.parent_at(session, run, step), now)


def add_revision(
    session: Session, run: RunRow, step: int, manifest: Manifest, export_command: str, parent: str | None, now: float
) -> RevisionRow:
    """The policy's next number. Raises Fatal for a policy that is not there."""
    policy = session.get(PolicyRow, manifest.policy, with_for_update=True)
    if policy is None:
        raise Fatal(f"policy {manifest.policy} is not in the catalog")
    policy.last_number += 1
    name = f"{policy.policy}@{policy.last_number}"
    row = RevisionRow(
        revision=name,
        policy=policy.policy,
        number=policy.last_number,
        base=manifest.base,
        run_id=run.run_id,
        step=step,
        export_command=export_command,
        parent=parent,
        adapter_sha256=manifest.adapter_sha256,
        adapter_bytes=manifest.adapter_bytes,
        zero_delta=manifest.zero_delta,
        manifest=manifest.model_copy(update={"revision": name}).model_dump(mode="json"),
        created_at=now,
        ephemeral=False,
    )
    session.add(row)
    file_uses.use(session, ephemeral.revision_use(name), manifest.files.values())
    _announce(session, run, row, now)
    return row


def _announce(session: Session, run: RunRow, row: RevisionRow, now: float) -> None:
    body = RevisionRegistered(
        run_id=run.run_id,
        policy=row.policy,
        base=row.base,
        revision=row.revision,
        number=row.number,
        step=row.step,
        adapter_sha256=row.adapter_sha256,
        adapter_bytes=row.adapter_bytes,
        parent=row.parent,
    )
    emit.fact(session, run, "mint.v1.revision.registered", row.revision, body, now)
