"""A thing of another tenant does not exist: path parts and runs, checked before they are shown.

Also the parts of paths and queries that many routes share. The patterns in the document are those by which names are
checked, here and in the catalog, in words.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Path, Query
from mint_schemas.names import NAME, PolicyName, ReferenceText, parse_reference
from pydantic import AfterValidator, StringConstraints, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from services.gateway.edge import Gateway
from services.gateway.identity import Identity
from shared.catalog.api import RunView
from shared.errors import Refused

__all__ = [
    "NAME_PATTERN",
    "RUN_EXAMPLE",
    "Cursor",
    "Limit",
    "PolicyFilter",
    "PolicyPart",
    "RevisionFilter",
    "RevisionText",
    "RunFilter",
    "RunId",
    "TenantFilter",
    "TenantPart",
    "owned_policy",
    "owned_run",
]

NAME_PATTERN = f"^{NAME}$"
RUN_EXAMPLE = "0b7c6f2e-3c55-5d0c-9d5e-1f0f8a7f2a10"
RUN_PATTERN = "^[A-Za-z0-9-]{1,100}$"
REVISION_PATTERN = f"^{NAME}/{NAME}@[1-9][0-9]{{0,8}}$"


def _text(pattern: str, example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [example]})


def _tenant_name(text: str) -> str:
    if re.fullmatch(NAME, text) is None:
        raise ValueError(f"{text[:80]!r} is no tenant: 1 to 63 of a-z, 0-9, '.', '_' and '-', a letter or digit first")
    return text


def _name(example: str) -> dict[str, Any]:
    return {"pattern": NAME_PATTERN, "examples": [example]}


TenantPart = Annotated[str, Path(max_length=300, json_schema_extra=_name("acme"))]
PolicyPart = Annotated[
    str, Path(max_length=300, description="its name within the tenant", json_schema_extra=_name("adder"))
]
RunId = Annotated[
    str,
    Path(pattern=RUN_PATTERN, description="as POST /mint/v1/runs and `mint runs` name it", examples=[RUN_EXAMPLE]),
]
TenantFilter = Annotated[
    Annotated[str, AfterValidator(_tenant_name), _text(NAME_PATTERN, "acme")] | SkipJsonSchema[None],
    Query(description="for a key of all tenants; any other key's is its own"),
]
PolicyFilter = Annotated[PolicyName, _text(f"^{NAME}/{NAME}$", "acme/adder")] | SkipJsonSchema[None]
RunFilter = Annotated[str, StringConstraints(pattern=RUN_PATTERN)] | SkipJsonSchema[None]
RevisionText = Annotated[ReferenceText, _text(REVISION_PATTERN, "acme/adder@2")]
RevisionFilter = RevisionText | SkipJsonSchema[None]
Limit = Annotated[int, Query(ge=1, le=500, description="items of a page")]
Cursor = Annotated[
    Annotated[str, StringConstraints(max_length=500)] | SkipJsonSchema[None],
    Query(description="`next_cursor` of the page before"),
]


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
