"""The object store port: immutable files, addressed by key, proved by sha256.

Invariant: a key is written once (`put` is put-if-absent); a second writer with other bytes is refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from mint_schemas.common import FileRef

from shared.errors import Fatal, Outage, Retryable


@dataclass(frozen=True)
class StoredObject:
    key: str
    size: int
    modified: datetime


class KeyTaken(Fatal):
    """The key exists with other bytes."""


class ObjectMissing(Fatal):
    """No object has that key."""


class BytesDiffer(Retryable):
    """What was read does not have the size or sha256 of its reference (cut download, corruption)."""


class StoreUnavailable(Outage):
    """The store did not answer."""


class ObjectStore(Protocol):
    async def put(self, key: str, data: bytes | Path) -> FileRef:
        """Store under a key that is free. The same bytes again: no-op, same reference. Raises KeyTaken."""
        ...

    async def get(self, ref: FileRef) -> bytes:
        """The bytes, verified by size and sha256. Raises ObjectMissing, BytesDiffer, StoreUnavailable."""
        ...

    async def fetch(self, ref: FileRef, path: Path) -> None:
        """Like `get`, to a file: written beside it first and renamed when verified, so that a file that
        is there is whole. A cut download is retried from the start, a bounded number of times."""
        ...

    async def size(self, key: str) -> int | None:
        """Size in bytes, or None if there is no such object."""
        ...

    def list(self, prefix: str) -> AsyncIterator[StoredObject]: ...

    async def delete(self, key: str) -> None:
        """Unknown key: no-op."""
        ...
