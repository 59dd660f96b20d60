"""Where the bytes of an operation are: small ones inside the message, others as a file named by its content.

In: bytes, or what refers to them. Out: the other. Invariant: a file is in the store before anything names it, and
what is read is what was written (the store proves it by sha256).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib

from shared.catalog.operations import Content
from shared.errors import Fatal
from shared.store import keys
from shared.store.port import ObjectStore

__all__ = ["INLINE_BYTES", "keep", "read"]

INLINE_BYTES = 32 << 10
"""What is larger is a file."""


async def keep(store: ObjectStore, data: bytes) -> Content:
    """Raises StoreUnavailable."""
    if len(data) <= INLINE_BYTES:
        # the field decodes what it is given
        return Content(inline=base64.b64encode(data))
    name = await asyncio.to_thread(hashlib.sha256, data)
    return Content(file=await store.put(keys.blob(name.hexdigest()), data))


async def read(store: ObjectStore, content: Content) -> bytes:
    """Raises Fatal for content that is nowhere, and like `ObjectStore.get`."""
    if content.inline is not None:
        return content.inline
    if content.file is None:
        raise Fatal("the content of an operation is neither in its message nor in a file")
    return await store.get(content.file)
