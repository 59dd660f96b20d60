"""What the catalog reads of a submitted payload, before the transaction that stores it.

In: content, inline or in the store. Out: decoded, for those kinds that name something of the catalog's. Invariant: a
payload that is a file is in the store, whole, before a row names it.
"""

from __future__ import annotations

import asyncio

from services.catalog.operations import READ_KINDS
from shared.catalog.operations import Content, Submit
from shared.errors import Fatal, Refused
from shared.operations.content import read
from shared.operations.payload import LoadPayload, Payload, ReverseKlPayload, SavePayload, decode
from shared.store.port import ObjectStore

__all__ = ["read_payload", "require_stored"]


async def read_payload(store: ObjectStore, request: Submit) -> Payload | None:
    """None for kinds that are the learner's alone, and for one that is not allowed anyway. Raises Refused (400) for
    bytes that are no payload, (409, `files_missing`) for a file that is not there."""
    await require_stored(store, request.payload)
    if request.kind not in READ_KINDS or request.failure is not None:
        return None
    try:
        value = await asyncio.to_thread(decode, await read(store, request.payload))
    except (Fatal, ValueError) as error:
        raise Refused(f"the payload of {request.kind} {request.seq_id} cannot be read: {error}") from error
    if not isinstance(value, SavePayload | LoadPayload | ReverseKlPayload):
        raise Refused(f"the payload of {request.kind} {request.seq_id} is a {type(value).__name__}")
    return value


async def require_stored(store: ObjectStore, content: Content) -> None:
    if content.file is None:
        return
    size = await store.size(content.file.key)
    if size != content.file.size:
        found = "nothing" if size is None else f"{size} bytes"
        raise Refused(
            f"{content.file.key} has {found} in the store, {content.file.size} bytes are named; put the file first",
            code="files_missing",
            status=409,
        )
