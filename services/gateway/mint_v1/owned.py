"""A thing of another tenant does not exist: path parts and runs, checked before they are shown."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from mint_schemas.names import parse_reference

from services.gateway.edge import Gateway
from services.gateway.identity import Identity
from shared.catalog.api import RunView
from shared.errors import Refused

__all__ = ["Cursor", "Limit", "PolicyPart", "TenantPart", "owned_policy", "owned_run"]

TenantPart = Annotated[str, Path(max_length=300)]
PolicyPart = Annotated[str, Path(max_length=300)]
Limit = Annotated[int, Query(ge=1, le=500)]
Cursor = Annotated[str | None, Query(max_length=500, description="`next_cursor` of the page before")]


def owned_policy(caller: Identity, tenant: str, policy: str) -> str:
    """The policy's name. Raises Refused: 400 for what is no name, 404 for another tenant's."""
    name = f"{tenant}/{policy}"
    try:
        reference = parse_reference(name)
    except ValueError as error:
        raise Refused(str(error), code="invalid_name") from error
    if str(reference) != reference.policy_name:
        raise Refused(f"{name!r} names an alias or revision; here a policy name is wanted", code="invalid_name")
    if not caller.owns(tenant):
        raise Refused(f"there is no policy {name!r}", code="not_found", status=404)
    return name


async def owned_run(gateway: Gateway, caller: Identity, run_id: str) -> RunView:
    """Raises Refused (404) for an unknown run and for another tenant's, in the same words."""
    missing = Refused(f"there is no run {run_id[:80]!r}", code="not_found", status=404)
    try:
        run = await gateway.catalog.run(run_id)
    except Refused as error:
        raise missing if error.status == 404 else error from error
    if not caller.owns_policy(run.policy):
        raise missing
    return run
