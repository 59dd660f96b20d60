"""API keys, as everyone but their holder knows them: by sha256, never by their text.

| method, path | request | answer |
|---|---|---|
| POST /internal/v1/keys | NewKey | KeyView |
| POST /internal/v1/keys/verify | VerifyKey | KeyView |
| GET /internal/v1/keys?tenant=&limit=&cursor= | | Page of KeyView, newest first |
| POST /internal/v1/keys/{key_id}/revoke | RevokeKey | KeyView |

Errors as in `api.py`. A plain sha256 is enough: slow and salted hashes make guessing what a person would choose
expensive, and of 256 random bits no guess is ever right. Lookups by it are quick, which each request needs.
Invariant: a key's text leaves `new_key` towards its holder alone.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Literal

from pydantic import Field

from shared.catalog.api import Message, Page
from shared.catalog.http import CatalogHttp, quoted

__all__ = [
    "KeyKind",
    "KeyView",
    "KeysClient",
    "NewKey",
    "RevokeKey",
    "VerifyKey",
    "could_be_key",
    "key_digest",
    "key_id_of",
    "new_key",
]

KEY_BYTES = 32
ID_CHARS = 16
_KEY = re.compile(r"(tml|sk)-[A-Za-z0-9_-]{43}")

KeyKind = Literal["tml", "sk"]
"""What a key begins with: Tinker clients insist on `tml-`, some others on `sk-`. Both may do the same."""


def new_key(kind: KeyKind = "tml") -> str:
    return f"{kind}-{secrets.token_urlsafe(KEY_BYTES)}"


def could_be_key(text: str) -> bool:
    """Whether `new_key` may have made it; what it did not make, no catalog knows."""
    return _KEY.fullmatch(text) is not None


def key_digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def key_id_of(sha256: str) -> str:
    """What a key is called in lists and audit trails: whoever holds it can work it out."""
    return sha256[:ID_CHARS]


class NewKey(Message):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: str
    label: str = Field("", max_length=200)
    kind: KeyKind = "tml"
    actor: str


class VerifyKey(Message):
    sha256: str


class RevokeKey(Message):
    actor: str


class KeyView(Message):
    """`revoked_at` None: it works."""

    key_id: str
    tenant: str = Field(description="whose policies, runs and data the key sees")
    label: str
    kind: KeyKind
    created_at: str
    created_by: str = Field(description="the key that asked for it")
    revoked_at: str | None = None
    revoked_by: str | None = None


class KeysClient(CatalogHttp):
    async def create(self, request: NewKey) -> KeyView:
        """Refused (400) for a tenant that cannot be one."""
        return await self._post("/keys", request, KeyView)

    async def verify(self, sha256: str) -> KeyView:
        """Also of a revoked one, which says so. Refused with 404 for an unknown one."""
        return await self._post("/keys/verify", VerifyKey(sha256=sha256), KeyView)

    async def list(self, tenant: str | None = None, limit: int = 50, cursor: str | None = None) -> Page[KeyView]:
        return await self._get("/keys", Page[KeyView], tenant=tenant, limit=limit, cursor=cursor)

    async def revoke(self, key_id: str, request: RevokeKey) -> KeyView:
        """Again: the same view. Refused with 404 for an unknown one."""
        return await self._post(f"/keys/{quoted(key_id)}/revoke", request, KeyView)
