"""Adapters made elsewhere: a revision, the training checkpoint of the same values, and the path that names both.

In: files that are in the store and were admitted. Out: a policy of its own with one revision, whose run is over.
Invariant: one import per (tenant, name) while its path is there.
"""

from __future__ import annotations

import hashlib
import itertools
import uuid

from mint_schemas.training import Lora
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import ephemeral, file_uses, outcomes, path_changes, paths, runs, sessions
from services.catalog.model_end import TINKER
from services.catalog.model_runs import Names, add_run, names_of
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import ModelRow, OperationRow
from services.catalog.register import add_revision
from services.catalog.tables import CheckpointRow, RunRow
from services.catalog.validate import name_errors
from shared.adapters import layout
from shared.bases import Base
from shared.catalog.operations import ImportPath, OperationView
from shared.errors import Refused
from shared.rl.checkpoint import ADAPTER_FILE, STATE_FILE

__all__ = ["import_path"]

STEP = 1
TRAINING_FILES = (ADAPTER_FILE, STATE_FILE)
SERVING_FILES = (layout.CONFIG_FILE, layout.TENSOR_FILE)


def import_path(session: Session, request: ImportPath, rules: OperationRules, now: float) -> OperationView:
    """Raises Refused: 400 for what does not fit together, 404 for a session that the tenant does not have, 409
    for another adapter under the name."""
    tenant = request.tenant
    if tenant is None:
        raise Refused("an import belongs to a tenant; name it")
    paths.check_name(request.name)
    if request.session_id is not None:
        sessions.find(session, request.session_id, tenant)
    named = hashlib.sha256(f"{tenant}/{request.name}".encode()).hexdigest()[:24]
    for attempt in itertools.count(1):
        model_id = f"import-{named}" if attempt == 1 else f"import-{named}-{attempt}"
        query = select(OperationRow).where(OperationRow.model_id == model_id, OperationRow.seq_id == 0)
        known = session.scalars(query).one_or_none()
        if known is None:
            break
        at = paths.PathName(model_id, "sampler_weights", request.name)
        if paths.find(session, at, now) is None:
            continue  # it was deleted, and its name is free again
        if known.digest != request.digest:
            raise Refused(f"{request.name} names another import already; choose another name", "path_taken", status=409)
        return outcomes.view(known, now)
    base = _check(request, rules, names_of(model_id, tenant))
    return outcomes.view(_import(session, request, tenant, names_of(model_id, tenant), base, rules, now), now)


def _check(request: ImportPath, rules: OperationRules, names: Names) -> Base:
    errors = name_errors({"policy": names.policy, "base": request.base}, rules.bases)
    missing = sorted({*TRAINING_FILES, *SERVING_FILES} - request.files.keys())
    if missing:
        errors.append(f"the import lacks {', '.join(missing)}")
    if errors:
        raise Refused("; ".join(errors))
    base, manifest = rules.bases[request.base], request.manifest
    combined = layout.adapter_sha256({name: request.files[name].sha256 for name in SERVING_FILES})
    for what, found, wanted in (
        ("base", manifest.base, base.name),
        ("base_sha256", manifest.base_sha256, base.sha256),
        ("adapter_sha256", manifest.adapter_sha256, combined),
        ("files", dict(manifest.files), {name: request.files[name] for name in SERVING_FILES}),
    ):
        if found != wanted:
            raise Refused(f"the manifest of the import has {what} {found!r}, expected {wanted!r}")
    if manifest.rank > base.max_rank:
        raise Refused(f"rank {manifest.rank} is above the maximum of {base.max_rank} for {base.name}")
    return base


def _import(
    session: Session,
    request: ImportPath,
    tenant: str,
    names: Names,
    base: Base,
    rules: OperationRules,
    now: float,
) -> OperationRow:
    held = request.manifest
    lora = Lora(rank=held.rank, alpha=held.alpha, use_rslora=held.use_rslora, target_modules=held.target_modules)
    asked = {"kind": TINKER, "model_id": names.model_id, "base": base.name, "import": request.name, "seed": 0}
    run = add_run(session, names, tenant, base, lora, asked, now)
    model = _model(session, request, tenant, names, lora, now)
    row = _operation(session, request, tenant, model, now)
    path = _put(session, request, model, run, rules, now)
    outcomes.finish(session, row, outcomes.saved(path=path, note=request.note), now)
    runs.end(session, run, "completed", f"imported as {request.name}", rules.bases, now)
    return row


def _model(session: Session, request: ImportPath, tenant: str, names: Names, lora: Lora, now: float) -> ModelRow:
    model = ModelRow(
        model_id=names.model_id,
        session_id=request.session_id,
        model_seq_id=0,
        tenant=tenant,
        run_id=names.run_id,
        policy=names.policy,
        base=request.base,
        lora=lora.model_dump(mode="json"),
        seed=0,
        train_unembed=False,
        user_metadata={},
        state="unloaded",
        fresh_optimizer=True,
        state_step=STEP,
        last_seq=0,
        next_seq=1,
        signals=0,
        signalled_seq=0,
        failure="",
        created_at=now,
        last_request_at=now,
    )
    session.add(model)
    session.flush()
    return model


def _operation(session: Session, request: ImportPath, tenant: str, model: ModelRow, now: float) -> OperationRow:
    row = OperationRow(
        request_id=uuid.uuid4().hex,
        tenant=tenant,
        kind=request.kind,
        state="queued",
        model_id=model.model_id,
        seq_id=0,
        place=0,
        digest=request.digest,
        details={},
        in_state=False,
        takes=0,
        issues=1,
        accepted_at=now,
        expired=False,
    )
    session.add(row)
    session.flush()
    return row


def _put(session: Session, request: ImportPath, model: ModelRow, run: RunRow, rules: OperationRules, now: float) -> str:
    manifest = request.manifest.model_copy(update={"policy": model.policy, "run_id": model.run_id, "step": STEP})
    revision = add_revision(session, run, STEP, manifest, f"{run.run_id}:import:{STEP}", None, now)
    held = {name: request.files[name] for name in TRAINING_FILES}
    files = {name: ref.model_dump(mode="json") for name, ref in held.items()}
    session.add(CheckpointRow(run_id=run.run_id, step=STEP, policy=model.policy, files=files, has_optimizer=False))
    # Its training checkpoint is of blobs too, and lives as long as the revision.
    file_uses.use(session, ephemeral.revision_use(revision.revision), held.values())
    at = paths.PathName(model.model_id, "sampler_weights", request.name)
    what = path_changes.Named(model.run_id, STEP, model.lora, False, {}, revision)
    path_changes.put(session, at, model.tenant, model.base, what, None, rules, now)
    return paths.uri(at.model_id, at.kind, at.name)
