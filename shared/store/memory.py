"""The object store in memory: the same promises as S3, for tests without a server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

from mint_schemas.common import FileRef

from shared.errors import Fatal

from .files import write_whole
from .port import BytesDiffer, KeyTaken, ObjectMissing, StoredObject

__all__ = ["MemoryStore"]


class MemoryStore:
    """Objects by key; lost with the process."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, datetime]] = {}

    async def put(self, key: str, data: bytes | Path) -> FileRef:
        content = await asyncio.to_thread(data.read_bytes) if isinstance(data, Path) else bytes(data)
        held = self._objects.get(key)
        if held is not None and held[0] != content:
            raise KeyTaken(f"{key} exists with other bytes; a key is written once, use another one")
        self._objects[key] = (content, datetime.now(UTC))
        return FileRef(key=key, sha256=hashlib.sha256(content).hexdigest(), size=len(content))

    async def get(self, ref: FileRef) -> bytes:
        held = self._objects.get(ref.key)
        if held is None:
            raise ObjectMissing(f"no object {ref.key} in the store; it was never committed or has been swept")
        content = held[0]
        if len(content) != ref.size or hashlib.sha256(content).hexdigest() != ref.sha256:
            raise BytesDiffer(f"{ref.key} does not match its reference ({ref.size} bytes, sha256 {ref.sha256})")
        return content

    async def fetch(self, ref: FileRef, path: Path) -> None:
        content = await self.get(ref)
        await asyncio.to_thread(write_whole, path, content)

    async def size(self, key: str) -> int | None:
        held = self._objects.get(key)
        return None if held is None else len(held[0])

    async def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        if not prefix:
            raise Fatal("an empty prefix would list the whole store; name one, such as 'attempts/'")
        for key in sorted(self._objects):
            if key.startswith(prefix) and (held := self._objects.get(key)):
                yield StoredObject(key, len(held[0]), held[1])

    async def delete(self, key: str) -> None:
        self._objects.pop(key, None)
