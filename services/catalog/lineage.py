"""What a run continues from: its parent revision, and the LoRA shape that follows from it.

Asked twice: when a request arrives, so that nonsense is refused at the edge, and when the run becomes
active, since `live` may have moved while it was queued.
"""

from __future__ import annotations

from dataclasses import dataclass

from mint_schemas.names import parse_reference
from mint_schemas.training import Lora, TrainRequested
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog.tables import AliasRow, PolicyRow, RevisionRow
from shared.adapters.manifest import Manifest
from shared.bases import Base
from shared.errors import Refused


@dataclass(frozen=True)
class Lineage:
    """`alias_version`: the version of the alias that the run may move; 0 = it does not exist."""

    parent: str | None
    lora: Lora
    alias_version: int


def trace_lineage(session: Session, request: TrainRequested, base: Base) -> Lineage:
    """Raises Refused, saying what the policy or the parent has."""
    policy = session.get(PolicyRow, request.policy)
    if policy is not None and policy.base != request.base:
        raise Refused(
            f"policy {request.policy} is on base model {policy.base}, the request names {request.base}; "
            "name its base, or train under another policy name"
        )
    parent = _parent(session, request)
    version = 0
    if request.promote_to is not None:
        alias = session.get(AliasRow, (request.policy, request.promote_to))
        version = alias.version if alias else 0
    if parent is None:
        return Lineage(None, request.lora, version)
    return Lineage(parent.revision, _continued_lora(request, parent, base), version)


def _parent(session: Session, request: TrainRequested) -> RevisionRow | None:
    if request.parent is None:
        live = session.get(AliasRow, (request.policy, "live"))
        return find_revision(session, live.revision) if live else None
    named = parse_reference(request.parent)
    if named.tenant != parse_reference(request.policy).tenant:
        raise Refused(
            f"parent {request.parent} belongs to tenant {named.tenant}; "
            "a run continues revisions of its own tenant only"
        )
    if named.number is not None:
        row = find_revision(session, str(named))
    else:
        alias = session.get(AliasRow, (named.policy_name, named.alias or "live"))
        row = find_revision(session, alias.revision) if alias else None
    if row is None:
        raise Refused(f"parent {request.parent} does not exist; `mint revisions {named.policy_name}` lists what does")
    if row.base != request.base:
        raise Refused(
            f"parent {request.parent} is on base model {row.base}, the request names {request.base}; "
            "a revision can only be continued on its own base"
        )
    if row.ephemeral:
        raise Refused(f"parent {row.revision} is ephemeral and may be gone before the run ends; save it under a name")
    return row


def find_revision(session: Session, revision: str) -> RevisionRow | None:
    return session.scalars(select(RevisionRow).where(RevisionRow.revision == revision)).one_or_none()


def _continued_lora(request: TrainRequested, parent: RevisionRow, base: Base) -> Lora:
    """The parent's settings; those that the request sets itself must equal them."""
    manifest = Manifest.model_validate(parent.manifest)
    if manifest.base_sha256 != base.sha256:
        raise Refused(
            f"parent {parent.revision} was trained on other weights of {base.name} (sha256 "
            f"{manifest.base_sha256[:12]}…, configured now {base.sha256[:12]}…); configure the same weights, "
            "or start another policy"
        )
    held = Lora(
        rank=manifest.rank,
        alpha=manifest.alpha,
        use_rslora=manifest.use_rslora,
        target_modules=manifest.target_modules,
    )
    asked = request.lora.model_fields_set if "lora" in request.model_fields_set else set()
    differing = [name for name in Lora.model_fields if name in asked and _differs(request.lora, held, name)]
    if differing:
        shown = ", ".join(f"{name}={_shown(held, name)} (asked: {_shown(request.lora, name)})" for name in differing)
        raise Refused(
            f"lora differs from the parent's: {parent.revision} has {shown}; "
            "leave lora out to continue with the parent's"
        )
    return held


def _differs(asked: Lora, held: Lora, name: str) -> bool:
    if name == "target_modules":
        return sorted(asked.target_modules) != sorted(held.target_modules)
    return bool(getattr(asked, name) != getattr(held, name))


def _shown(lora: Lora, name: str) -> str:
    value = getattr(lora, name)
    return ",".join(sorted(value)) if isinstance(value, tuple) else str(value)
