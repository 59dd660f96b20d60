"""Who is asking: `Authorization: Bearer KEY` or `X-API-Key: KEY` becomes an `Identity`.

In: a request's headers and its peer's address; the keys of the settings and those that the catalog knows. Out: the
tenant that the key acts for, or every tenant. Invariant: no key, no answer; the local development key works from
loopback only, also behind a proxy; a thing of another tenant does not exist for this caller.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from mint_schemas.names import NAME
from starlette.requests import Request

from services.gateway.keyring import KeyBook, Keyring
from services.gateway.tokens import Tokens, looks_like_token
from shared.catalog.keys import KeyView, could_be_key, key_digest
from shared.errors import Fatal, Refused

__all__ = ["ALL_TENANTS", "Identity", "Keys", "presented_key"]

ALL_TENANTS = "*"


@dataclass(frozen=True)
class Identity:
    """`tenant` None acts for every tenant. `actor` names the key in the audit trail, never its text. `stale`: the
    catalog does not answer, and this is what it last said of the key."""

    tenant: str | None
    actor: str
    stale: bool = False

    def owns(self, tenant: str) -> bool:
        return self.tenant is None or self.tenant == tenant

    def owns_policy(self, policy: str | None) -> bool:
        """Whether `tenant/policy` (or a reference into it) is the caller's; None belongs to nobody."""
        return self.tenant is None or (policy is not None and self.owns(policy.partition("/")[0]))

    def scope(self, tenant: str | None) -> str | None:
        """The tenant to list for: the one asked for, where it is the caller's. Raises Refused (404)."""
        if tenant is None:
            return self.tenant
        if not self.owns(tenant):
            raise Refused(f"there is no tenant {tenant!r} for this key", code="not_found", status=404)
        return tenant


class Keys:
    """`keys` maps a key to its tenant, or to `*` for all; `local_key` empty switches the local key off; `book` None
    knows no keys but these. `tokens` stand for any of them."""

    def __init__(self, keys: Mapping[str, str], local_key: str, book: KeyBook | None = None, *, tokens: Tokens) -> None:
        self._known = {
            key_digest(key): Identity(_tenant(tenant), f"key:{key_digest(key)[:8]}") for key, tenant in keys.items()
        }
        self._local = key_digest(local_key) if local_key else None
        self._ring = Keyring(book) if book is not None else None
        self._book, self._tokens = book, tokens

    @property
    def book(self) -> KeyBook:
        """Raises Refused (404) where keys come from the settings alone."""
        if self._book is None:
            raise Refused("this gateway keeps no keys but those of its settings", code="not_found", status=404)
        return self._book

    async def identify(self, request: Request) -> Identity:
        """Raises Refused (401), saying how to send a key, and Retryable while a key cannot be checked."""
        key = presented_key(request)
        if not key:
            raise _unauthorised("this route needs a key: send 'Authorization: Bearer KEY' or 'X-API-Key: KEY'")
        if looks_like_token(key):
            digest, possible = self._tokens.read(key, time.time()).sha256, True
        else:
            digest, possible = key_digest(key), could_be_key(key)
        if self._local is not None and hmac.compare_digest(digest, self._local):
            if not _from_loopback(request):
                raise _unauthorised("the local development key works from this machine only; use a tenant's key")
            return Identity(None, "key:local")
        # Digests are compared, so that timing tells nothing about a key.
        return self._known.get(digest) or await self._in_catalog(digest, possible)

    def token(self, key: str, identity: Identity) -> str:
        """For the key that `identity` showed, or for its token: then it ends when that does."""
        now, tenant = time.time(), identity.tenant or ALL_TENANTS
        if not looks_like_token(key):
            return self._tokens.issue(key_digest(key), now, identity.actor, tenant)
        shown = self._tokens.read(key, now)
        return self._tokens.issue(shown.sha256, now, identity.actor, tenant, shown.end)

    async def _in_catalog(self, digest: str, possible: bool) -> Identity:
        view: KeyView | None = None
        stale = False
        if self._ring is not None and possible:
            view, stale = await self._ring.find(digest)
        if view is None:
            raise _unauthorised("this key is not known here")
        if view.revoked_at is not None:
            raise _unauthorised(f"this key (id {view.key_id}) was revoked; ask for a new one")
        return Identity(view.tenant, f"key:{view.key_id}", stale)


def _tenant(tenant: str) -> str | None:
    if tenant != ALL_TENANTS and not re.fullmatch(NAME, tenant):
        raise Fatal(
            f"MINT_GATEWAY_KEYS: {tenant!r} is no tenant; write {ALL_TENANTS!r} or a name of a-z, 0-9, '.', '_', '-'"
        )
    return None if tenant == ALL_TENANTS else tenant


def _unauthorised(message: str) -> Refused:
    return Refused(message, code="invalid_api_key", status=401)


def presented_key(request: Request) -> str:
    """What the caller sent as its key, or nothing."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return request.headers.get("x-api-key", "").strip()


def _from_loopback(request: Request) -> bool:
    """The peer is this machine, and so is everyone a proxy says it speaks for."""
    if request.client is None or not _is_loopback(request.client.host):
        return False
    if "forwarded" in request.headers:
        return False
    forwarded = [part.strip() for value in request.headers.getlist("x-forwarded-for") for part in value.split(",")]
    return all(_is_loopback(address) for address in forwarded)


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)
