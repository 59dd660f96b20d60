"""Models that begin: fresh, or from a path.

Invariant: one model per (session, number), whatever is retried; it is there, with its policy and its run, once its
client hears of it.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

from mint_schemas.commands import CheckpointRef
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import file_uses, outcomes, paths, sessions
from services.catalog.model_end import TINKER, start_use
from services.catalog.model_runs import Names, add_run, names_of
from services.catalog.operation_rules import OperationRules
from services.catalog.operation_tables import ModelRow, OperationRow
from services.catalog.validate import name_errors
from shared.adapters.layout import canonical_json
from shared.catalog.operations import NewModel, OperationView, PathView
from shared.errors import Refused
from shared.rl.seeds import derive_seed

__all__ = ["new_model"]

NOT_TRAINED = "train_unembed is recorded, but the output layer is not trained in this version"


def new_model(session: Session, request: NewModel, rules: OperationRules, now: float) -> OperationView:
    """The same again: the same operation. Raises Refused: 400 for what cannot be trained here, 404 for a session or
    path that the tenant does not have, 409 for another content under the number, 410 for a session that ended."""
    outcomes.check_number("model_seq_id", request.model_seq_id, most=2**31 - 1)
    owner = sessions.find(session, request.session_id, request.tenant, lock=True)
    model_id = f"{owner.session_id}:train:{request.model_seq_id}"
    content = canonical_json(request.model_dump(mode="json", exclude={"tenant", "actor"}))
    digest = hashlib.sha256(content).hexdigest()
    query = select(OperationRow).where(OperationRow.model_id == model_id, OperationRow.kind == "create_model")
    known = session.scalars(query).one_or_none()
    if known is not None:
        if known.digest != digest:
            message = f"model {request.model_seq_id} of session {owner.session_id} exists with other settings"
            raise Refused(f"{message}; use the next model_seq_id", code="other_payload", status=409)
        return outcomes.view(known, now)
    sessions.touch(owner, now)
    names = names_of(model_id, owner.tenant)
    _check(request, names, rules)
    origin = paths.resolve(session, request.path, owner.tenant, now, hold=True) if request.path else None
    if origin is not None:
        paths.check_fits(origin, request.base, request.lora)
    model = _add(session, request, owner.tenant, names, origin, rules, now)
    row = _created(session, request, model, digest, origin, now)
    return outcomes.view(row, now)


def _check(request: NewModel, names: Names, rules: OperationRules) -> None:
    errors = name_errors({"policy": names.policy, "base": request.base}, rules.bases)
    base = rules.bases.get(request.base)
    if base is not None and request.lora.rank > base.max_rank:
        errors.append(f"lora rank {request.lora.rank} is above the maximum of {base.max_rank} for {base.name}")
    unknown = sorted(set(request.lora.target_modules) - set(base.target_modules)) if base is not None else []
    if unknown and base is not None:
        allowed = ", ".join(base.target_modules)
        errors.append(f"{', '.join(unknown)} cannot be trained on {base.name}; allowed are {allowed}")
    if errors:
        raise Refused("; ".join(errors))


def _add(
    session: Session,
    request: NewModel,
    tenant: str,
    names: Names,
    origin: PathView | None,
    rules: OperationRules,
    now: float,
) -> ModelRow:
    seed = request.seed if request.seed is not None else derive_seed("tinker", names.model_id) % 2**31
    base = rules.bases[request.base]
    run = add_run(session, names, tenant, base, request.lora, _request_of(request, names, seed), now)
    run.parent = origin.revision if origin is not None else None
    start = _start(origin, request.optimizer)
    model = ModelRow(
        model_id=names.model_id,
        session_id=request.session_id,
        model_seq_id=request.model_seq_id,
        tenant=tenant,
        run_id=names.run_id,
        policy=names.policy,
        base=request.base,
        lora=request.lora.model_dump(mode="json"),
        seed=seed,
        train_unembed=request.train_unembed,
        user_metadata=dict(request.user_metadata),
        state="active",
        start=start.model_dump(mode="json") if start is not None else None,
        fresh_optimizer=start is None or "optimizer.safetensors" not in start.files,
        state_step=0,
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
    if start is not None:
        file_uses.use(session, start_use(model.model_id), start.files.values())
    return model


def _start(origin: PathView | None, optimizer: bool) -> CheckpointRef | None:
    if origin is None or origin.checkpoint is None:
        return None
    return paths.taken_from(origin.checkpoint, optimizer)


def _request_of(request: NewModel, names: Names, seed: int) -> dict[str, Any]:
    """What the run shows as its request: no TrainRequested, and read by nobody as one."""
    return {
        "kind": TINKER,
        "model_id": names.model_id,
        "session_id": request.session_id,
        "policy": names.policy,
        "base": request.base,
        "lora": request.lora.model_dump(mode="json"),
        "seed": seed,
        "train_unembed": request.train_unembed,
        "path": request.path,
        "optimizer": request.optimizer,
    }


def _created(
    session: Session, request: NewModel, model: ModelRow, digest: str, origin: PathView | None, now: float
) -> OperationRow:
    row = OperationRow(
        request_id=uuid.uuid4().hex,
        tenant=model.tenant,
        kind="create_model",
        state="queued",
        model_id=model.model_id,
        seq_id=0,
        place=0,
        digest=digest,
        details={},
        in_state=False,
        takes=0,
        issues=1,
        accepted_at=now,
        expired=False,
    )
    session.add(row)
    session.flush()
    notes = [NOT_TRAINED] if model.train_unembed else []
    if origin is not None and request.optimizer and model.fresh_optimizer:
        notes.append(f"{request.path} has no optimizer state; the moments begin afresh")
    outcomes.finish(session, row, outcomes.saved(path=request.path or "", note="; ".join(notes)), now)
    return row
