"""/mint/v1/data: a tenant's own files, stored under their hashes, to be named in a TrainRequested.

In: the file as the raw body, of any length up to the bound, never held in memory. Out: `{key, sha256,
size}`. Invariant: the answer comes after the store has the bytes and the catalog has the row; the same
file twice is the same reference.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from pathlib import Path
from typing import IO

from mint_schemas.common import FileRef
from starlette.requests import ClientDisconnect, Request

from services.gateway.edge import Caller, Here
from services.gateway.identity import Identity
from services.gateway.mint_v1.owned import Cursor, Limit, TenantFilter
from services.gateway.streaming import ClientGone
from shared.catalog.api import DataView, Page
from shared.errors import Refused
from shared.store import keys

__all__ = ["list_data", "put_data"]

WRITE_BYTES = 1 << 20


async def put_data(request: Request, gateway: Here, caller: Caller, tenant: TenantFilter = None) -> FileRef:
    """The file itself as the body; the answer is the reference to name it by. The same file again: the same answer."""
    owner = _owner(caller, tenant)
    if request.headers.get("content-type", "").startswith("multipart/"):
        raise Refused("send the file itself as the body, not a form (curl: --data-binary @FILE)", status=415)
    bound = gateway.settings.gateway_max_upload_bytes
    _check_size(int(request.headers.get("content-length", "0")), bound)
    with tempfile.NamedTemporaryFile(prefix="mint-data-") as file:
        try:
            sha256 = await _receive(request, file, bound)
        except ClientDisconnect as error:
            raise ClientGone from error
        ref = await gateway.store.put(keys.data(owner, sha256), Path(file.name))
    return await gateway.catalog.register_data(owner, ref)


async def list_data(
    gateway: Here, caller: Caller, tenant: TenantFilter = None, limit: Limit = 50, cursor: Cursor = None
) -> Page[DataView]:
    """In order of sha256."""
    return await gateway.catalog.list_data(_owner(caller, tenant), limit=limit, cursor=cursor)


def _owner(caller: Identity, tenant: str | None) -> str:
    owner = caller.scope(tenant)
    if owner is None:
        raise Refused(
            "this key acts for every tenant: say whose data is meant with ?tenant=NAME, "
            "the tenant of the policies that train on it",
            code="tenant_needed",
        )
    return owner


def _check_size(size: int, bound: int) -> None:
    if size > bound:
        raise Refused(f"the file has at least {size} bytes; at most {bound} are allowed", "too_large", status=413)


async def _receive(request: Request, file: IO[bytes], bound: int) -> str:
    """The sha256 of the body, which is then in the file."""
    digest, size, waiting = hashlib.sha256(), 0, bytearray()

    def write(data: bytes) -> None:
        digest.update(data)
        file.write(data)

    async for chunk in request.stream():
        size += len(chunk)
        _check_size(size, bound)
        waiting += chunk
        if len(waiting) >= WRITE_BYTES:
            await asyncio.to_thread(write, bytes(waiting))
            waiting.clear()
    if size == 0:
        raise Refused("the body is empty; send the file's bytes as the body")
    await asyncio.to_thread(write, bytes(waiting))
    await asyncio.to_thread(file.flush)
    return digest.hexdigest()
