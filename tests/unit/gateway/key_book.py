"""The catalog's keys in memory: a book that a test can take away."""

from __future__ import annotations

import asyncio

from shared.catalog.api import Page
from shared.catalog.keys import KeyView, NewKey, RevokeKey, key_digest, key_id_of, new_key
from shared.errors import Outage, Refused

AT = "2026-01-02T03:04:05.000Z"


class FakeBook:
    """`asked` lists the digests that were verified. With `down` set nothing answers; with `held` set a verification
    that has looked (`looked`) does not answer before it is released."""

    def __init__(self) -> None:
        self.views: dict[str, KeyView] = {}
        self.asked: list[str] = []
        self.down = False
        self.held: asyncio.Event | None = None
        self.looked = asyncio.Event()

    def made(self, tenant: str) -> str:
        """The text of a new key of the tenant."""
        key = new_key()
        self._add(NewKey(sha256=key_digest(key), tenant=tenant, actor="test"))
        return key

    def revoked(self, key: str) -> None:
        digest = key_digest(key)
        self.views[digest] = self.views[digest].model_copy(update={"revoked_at": AT, "revoked_by": "test"})

    def _add(self, request: NewKey) -> KeyView:
        view = KeyView(
            key_id=key_id_of(request.sha256),
            tenant=request.tenant,
            label=request.label,
            kind=request.kind,
            created_at=AT,
            created_by=request.actor,
        )
        self.views[request.sha256] = view
        return view

    def _answering(self) -> None:
        if self.down:
            raise Outage("the catalog does not answer")

    async def create(self, request: NewKey) -> KeyView:
        self._answering()
        return self._add(request)

    async def verify(self, sha256: str) -> KeyView:
        self.asked.append(sha256)
        self._answering()
        view = self.views.get(sha256)
        self.looked.set()
        if self.held is not None:
            await self.held.wait()
        if view is None:
            raise Refused("there is no such key", "not_found", status=404)
        return view

    async def list(self, tenant: str | None = None, limit: int = 50, cursor: str | None = None) -> Page[KeyView]:
        self._answering()
        found = [view for view in reversed(self.views.values()) if tenant in (None, view.tenant)]
        return Page[KeyView](items=found[:limit])

    async def revoke(self, key_id: str, request: RevokeKey) -> KeyView:
        self._answering()
        for digest, view in self.views.items():
            if view.key_id == key_id:
                first = {"revoked_at": AT, "revoked_by": request.actor} if view.revoked_at is None else {}
                self.views[digest] = view.model_copy(update=first)
                return self.views[digest]
        raise Refused(f"there is no key {key_id!r}", "not_found", status=404)
