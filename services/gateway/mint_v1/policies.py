"""Policies, their revisions and aliases: reading them, moving an alias, rolling back."""

from __future__ import annotations

from typing import Annotated

from mint_schemas.common import WHOLE
from mint_schemas.names import AliasName, parse_reference
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from services.gateway.edge import Caller, Here
from services.gateway.identity import Identity
from services.gateway.mint_v1.owned import (
    NAME_PATTERN,
    Cursor,
    Limit,
    PolicyPart,
    RevisionText,
    TenantFilter,
    TenantPart,
    owned_policy,
)
from shared.catalog.api import (
    AliasMove,
    AliasView,
    MoveAlias,
    Page,
    PinPolicy,
    PolicyView,
    RevisionView,
    Rollback,
)
from shared.errors import Refused

__all__ = [
    "list_moves",
    "list_policies",
    "list_revisions",
    "move_alias",
    "pin_policy",
    "roll_back",
    "show_policy",
]

Timeout = Annotated[float, Field(gt=0, le=600, allow_inf_nan=False, description="seconds to wait for readiness")]
Alias = Annotated[AliasName, WithJsonSchema({"type": "string", "pattern": NAME_PATTERN, "examples": ["live"]})]
Version = Annotated[int, Field(ge=0), WHOLE]
Force = Annotated[bool, Field(description="move at once, ready or not: requests then wait for the load")]


class AliasTarget(BaseModel):
    """Compare and set: with `expected_version` the alias moves only if that version still holds."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        json_schema_extra={"examples": [{"revision": "acme/adder@2", "reason": "try it"}]},
    )
    revision: Annotated[RevisionText, Field(description="of this very policy")]
    expected_version: Version | None = None
    reason: Annotated[str, Field(min_length=1, max_length=200)] = "manual"
    timeout_s: Timeout = 60.0
    force: Force = False


class RollbackTo(BaseModel):
    """`to` None: the revision that the alias pointed at before its current one."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        json_schema_extra={"examples": [{}, {"alias": "live", "to": "acme/adder@1"}]},
    )
    alias: Alias = "live"
    to: RevisionText | None = None
    timeout_s: Timeout = 60.0
    force: Force = False


class Pin(BaseModel):
    """A pinned policy's aliased revisions stay resident on every replica of its base model."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    pinned: bool = True


async def list_policies(
    gateway: Here, caller: Caller, tenant: TenantFilter = None, limit: Limit = 50, cursor: Cursor = None
) -> Page[PolicyView]:
    """By name."""
    return await gateway.catalog.policies(tenant=caller.scope(tenant), limit=limit, cursor=cursor)


async def show_policy(tenant: TenantPart, policy: PolicyPart, gateway: Here, caller: Caller) -> PolicyView:
    """What its aliases point at, how many revisions it has, and which run trains it now."""
    name = owned_policy(caller, tenant, policy)
    try:
        return await gateway.catalog.policy(name)
    except Refused as error:
        raise _for(caller, error) from error


async def list_revisions(
    tenant: TenantPart, policy: PolicyPart, gateway: Here, caller: Caller, limit: Limit = 50, cursor: Cursor = None
) -> Page[RevisionView]:
    """Newest first, with manifest, score, aliases, and the replicas on which each is ready."""
    name = owned_policy(caller, tenant, policy)
    try:
        return await gateway.catalog.revisions(name, limit=limit, cursor=cursor)
    except Refused as error:
        raise _for(caller, error) from error


async def list_moves(tenant: TenantPart, policy: PolicyPart, gateway: Here, caller: Caller) -> list[AliasMove]:
    """The audit trail of the policy's aliases, oldest first: who moved which, from where to where, and why."""
    return await gateway.catalog.moves(owned_policy(caller, tenant, policy))


async def move_alias(
    tenant: TenantPart, policy: PolicyPart, alias: Alias, body: AliasTarget, gateway: Here, caller: Caller
) -> AliasView:
    """Answers once the revision is ready and the alias has moved; 409 with the reason otherwise."""
    name = owned_policy(caller, tenant, policy)
    request = MoveAlias(
        revision=_revision_of(name, body.revision),
        actor=caller.actor,
        reason=body.reason,
        expected_version=body.expected_version,
        timeout_s=body.timeout_s,
        force=body.force,
    )
    return await gateway.catalog.move_alias(name, alias, request)


async def roll_back(
    tenant: TenantPart, policy: PolicyPart, gateway: Here, caller: Caller, body: RollbackTo | None = None
) -> AliasView:
    """Answers once the earlier revision is ready and the alias points at it; 409 with the reason otherwise."""
    name = owned_policy(caller, tenant, policy)
    wanted = body or RollbackTo()
    to = None if wanted.to is None else _revision_of(name, wanted.to)
    request = Rollback(actor=caller.actor, alias=wanted.alias, to=to, timeout_s=wanted.timeout_s, force=wanted.force)
    return await gateway.catalog.rollback(name, request)


async def pin_policy(tenant: TenantPart, policy: PolicyPart, body: Pin, gateway: Here, caller: Caller) -> PolicyView:
    """Keep what the policy's aliases point at resident, or no longer; 409 when too many are pinned."""
    return await gateway.catalog.pin(owned_policy(caller, tenant, policy), PinPolicy(pinned=body.pinned))


def _revision_of(policy: str, text: str) -> str:
    """An alias points at a revision of its own policy; anything else is refused in words."""
    reference = parse_reference(text)
    if reference.number is None or reference.policy_name != policy:
        raise Refused(f"revision: {text!r} is no revision of {policy}; write {policy}@N", code="invalid_revision")
    return text


def _for(caller: Identity, error: Refused) -> Refused:
    """The same refusal, without near matches that are another tenant's."""
    near = [name for name in error.near if caller.owns_policy(name)]
    message = str(error) if near == error.near else "there is no such policy or revision"
    return Refused(message, error.code, near, error.status)
