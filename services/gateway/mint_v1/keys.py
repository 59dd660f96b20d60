"""API keys of tenants: made, listed, revoked, by a key of all tenants.

In: a tenant. Out: a key, in this one answer and never again. Invariant: the catalog, the logs and the audit trail know
a key by its id and its sha256 alone.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from mint_schemas.names import NAME
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from services.gateway.edge import Caller, Here
from services.gateway.identity import Identity
from services.gateway.mint_v1.owned import Cursor, Limit, TenantFilter
from shared.catalog.api import Page
from shared.catalog.keys import KeyKind, KeyView, NewKey, RevokeKey, key_digest, new_key
from shared.errors import Refused

__all__ = ["KeyCreated", "KeyRequest", "create_key", "list_keys", "revoke_key"]

KeyId = Annotated[
    str, Path(pattern="^[0-9a-f]{16}$", description="as GET /mint/v1/keys names it", examples=["9f86d081884c7d65"])
]


class KeyRequest(BaseModel):
    """`kind`: what the key begins with, `tml-` for Tinker clients."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        json_schema_extra={"examples": [{"tenant": "acme", "label": "nightly jobs"}]},
    )
    tenant: Annotated[str, Field(pattern=f"^{NAME}$", description="whose policies, runs and data the key may see")]
    label: Annotated[str, Field(max_length=200, description="for people")] = ""
    kind: KeyKind = "tml"


class KeyCreated(KeyView):
    key: str = Field(description="shown this once: keep it as a password is kept")


async def create_key(body: KeyRequest, gateway: Here, caller: Caller, response: Response) -> KeyCreated:
    """The key works at once at every gateway that was not asked about it before, and within 2 s at all."""
    _manages(caller)
    key = new_key(body.kind)
    request = NewKey(sha256=key_digest(key), tenant=body.tenant, label=body.label, kind=body.kind, actor=caller.actor)
    view = await gateway.keys.book.create(request)
    response.headers["cache-control"] = "no-store"
    return KeyCreated(**view.model_dump(), key=key)


async def list_keys(
    gateway: Here, caller: Caller, tenant: TenantFilter = None, limit: Limit = 50, cursor: Cursor = None
) -> Page[KeyView]:
    """Newest first, revoked ones too; those of the gateway's settings are not among them."""
    _manages(caller)
    return await gateway.keys.book.list(tenant=tenant, limit=limit, cursor=cursor)


async def revoke_key(key_id: KeyId, gateway: Here, caller: Caller) -> KeyView:
    """The key ends within 10 s at every gateway; what it did stays. Again: the same answer."""
    _manages(caller)
    return await gateway.keys.book.revoke(key_id, RevokeKey(actor=caller.actor))


def _manages(caller: Identity) -> None:
    if caller.tenant is not None:
        raise Refused(
            f"keys are managed with a key of all tenants; this one acts for {caller.tenant!r}", "forbidden", status=403
        )
