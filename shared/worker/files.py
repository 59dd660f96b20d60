"""The files of one attempt at one command: uploaded first, named by a row last.

Invariant: an attempt writes under a path of its own or under a content address, so that two attempts
never meet and a crash leaves nothing that a row names.
"""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

from mint_schemas import FileRef

from shared.store import keys
from shared.store.files import digest
from shared.store.port import ObjectStore
from shared.telemetry import span, spans

from .faults import Faults

__all__ = ["AttemptFiles"]


class AttemptFiles:
    """`attempt_id` is made anew for each take."""

    def __init__(self, store: ObjectStore, run_id: str, command_id: str, faults: Faults | None = None) -> None:
        self._store, self._run_id, self._command_id = store, run_id, command_id
        self._faults = faults or Faults("")
        self.attempt_id = uuid.uuid4().hex[:12]

    async def put(self, name: str, data: bytes | Path) -> FileRef:
        """Store a file of this attempt; `name` may be used once. Raises StoreUnavailable, KeyTaken."""
        return await self._put(keys.attempt(self._run_id, self._command_id, self.attempt_id, name), data)

    async def put_blob(self, data: bytes | Path) -> FileRef:
        """Store under its own hash; what is there already is shared. Raises StoreUnavailable."""
        sha256, _ = await asyncio.to_thread(digest, data)
        return await self._put(keys.blob(sha256), data)

    async def _put(self, key: str, data: bytes | Path) -> FileRef:
        self._faults.hit("before_files")
        with span(spans.STORE_PUT, attributes={"mint.key": key}):
            return await self._store.put(key, data)
