"""Sweeping: files that no committed row names, and that are old enough not to be about to be named."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime, timedelta

from .keys import ATTEMPTS, BLOBS, DATA
from .port import ObjectStore

__all__ = ["sweep"]

Named = Callable[[list[str]], Awaitable[Collection[str]]]

_BATCH = 500


async def sweep(
    store: ObjectStore, named: Named, older_than: timedelta = timedelta(hours=24), now: datetime | None = None
) -> list[str]:
    """Delete every object under the known prefixes that is older than `older_than` and that
    `named(keys)` does not return as named by a row. Returns the deleted keys."""
    before = (now or datetime.now(UTC)) - older_than
    deleted: list[str] = []
    for prefix in (ATTEMPTS, BLOBS, DATA):
        batch: list[str] = []
        async for entry in store.list(prefix):
            if entry.modified < before:
                batch.append(entry.key)
            if len(batch) >= _BATCH:
                deleted += await _delete_unnamed(store, named, batch, before)
                batch = []
        deleted += await _delete_unnamed(store, named, batch, before)
    return deleted


async def _delete_unnamed(store: ObjectStore, named: Named, keys: list[str], before: datetime) -> list[str]:
    if not keys:
        return []
    kept = set(await named(keys))
    gone = []
    for key in keys:
        if key not in kept and await _still_old(store, key, before):
            await store.delete(key)
            gone.append(key)
    return gone


async def _still_old(store: ObjectStore, key: str, before: datetime) -> bool:
    """Putting the same bytes again makes an object young: somebody is about to name it."""
    return any([entry.modified < before async for entry in store.list(key) if entry.key == key])
