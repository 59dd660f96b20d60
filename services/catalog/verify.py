"""Before a commit: every file that a result names is in the store, whole, and where it may be.

Invariant: files first, the row last. A worker's attempt may name its own run's files and blobs only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from mint_schemas.common import FileRef
from pydantic import ValidationError

from services.catalog.commits import named_files
from shared.adapters.manifest import Manifest
from shared.catalog.api import ExportResult, Result
from shared.errors import Refused
from shared.store import keys
from shared.store.port import ObjectStore


async def verify_files(store: ObjectStore, run_id: str, result: Result) -> None:
    """Raises Refused (409, `files_missing`), and Retryable when the store is away."""
    await asyncio.gather(*(_verify(store, run_id, ref) for ref in named_files(result)))
    if isinstance(result, ExportResult):
        await _verify_manifest(store, result)


async def _verify(store: ObjectStore, run_id: str, ref: FileRef) -> None:
    if not ref.key.startswith(f"{keys.ATTEMPTS}{run_id}/") and ref.key != keys.blob(ref.sha256):
        raise _refused(f"{ref.key} is neither a file of run {run_id} nor the blob of its own sha256")
    await _stored(store, ref)


async def verify_refs(store: ObjectStore, refs: Iterable[FileRef]) -> None:
    """The same for what an operation or an import names: files of an attempt, and blobs."""
    await asyncio.gather(*(_verify_ref(store, ref) for ref in refs))


async def _verify_ref(store: ObjectStore, ref: FileRef) -> None:
    if not ref.key.startswith(keys.ATTEMPTS) and ref.key != keys.blob(ref.sha256):
        raise _refused(f"{ref.key} is neither a file of an attempt nor the blob of its own sha256")
    await _stored(store, ref)


async def _stored(store: ObjectStore, ref: FileRef) -> None:
    size = await store.size(ref.key)
    if size is None:
        raise _refused(f"{ref.key} is not in the store; put the files first, then commit")
    if size != ref.size:
        raise _refused(f"{ref.key} has {size} bytes in the store, the result says {ref.size}")


async def _verify_manifest(store: ObjectStore, result: ExportResult) -> None:
    try:
        stored = Manifest.model_validate_json(await store.get(result.manifest))
    except ValidationError as error:
        raise _refused(f"{result.manifest.key} is no manifest: {error.error_count()} fields are wrong") from None
    if stored != result.content:
        raise _refused(f"{result.manifest.key} says something else than the manifest in the result")


def _refused(message: str) -> Refused:
    return Refused(message, code="files_missing", status=409)
