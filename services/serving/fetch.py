"""The disk tier: adapter files near the engine, one directory per adapter_sha256.

In flow manifests, out flow directories in serving layout. Invariant: a directory that has its final
name is whole and was verified; it is made under another name and renamed, and leaves the same way. Files
that an engine holds, or that a load is about to use, stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Set
from pathlib import Path
from typing import Literal

from services.serving.disk import PARTIAL, DiskIndex, Stamps, stamps
from shared.adapters import layout
from shared.adapters.manifest import Manifest
from shared.errors import Fatal
from shared.store.port import ObjectStore

logger = logging.getLogger(__name__)

Found = Literal["disk", "catalog"]


class AdapterFiles:
    """`in_use` names the adapter digests that must stay on disk, above the bound if need be; `max_bytes`
    bounds the rest."""

    def __init__(self, store: ObjectStore, root: Path, max_bytes: int, in_use: Callable[[], Set[str]]) -> None:
        self._store, self.root, self._max_bytes, self._in_use = store, root, max_bytes, in_use
        root.mkdir(parents=True, exist_ok=True)
        for path in root.glob(f"{PARTIAL}*"):
            shutil.rmtree(path)
        self._index = DiskIndex(root)
        self._coming = 0
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    async def ensure(self, manifest: Manifest) -> tuple[Path, Found]:
        """The directory with the manifest's files, and the tier that they were found in: fetched unless
        they are there and verified. Files that this process hashed are hashed again only when their size,
        inode or times changed; the engine's admission hashes what it reads once more.

        Raises Fatal for a manifest that contradicts itself or names files that the store does not have
        in that size, Retryable (from the store) for a cut download."""
        _check_manifest(manifest)
        digest = manifest.adapter_sha256
        directory = self.root / digest
        async with self._alone(digest):
            entry = self._index.get(digest)
            if entry is not None:
                entry.proved = await asyncio.to_thread(_proved, directory, manifest, entry.proved)
                if entry.proved is not None:
                    self._index.use(digest)
                    return directory, "disk"
                logger.warning("adapter %s changed on disk; fetching it again", digest)
                await self._remove(digest)
            await self._fetch(manifest, directory)
            return directory, "catalog"

    async def intact(self, manifest: Manifest) -> bool:
        """Whether the files on disk still hash to the manifest's; if not they are fetched at the next use."""
        entry = self._index.get(manifest.adapter_sha256)
        whole = await asyncio.to_thread(is_whole, self.root / manifest.adapter_sha256, manifest)
        if entry is not None and not whole:
            entry.proved = None
        return whole

    def has(self, digest: str) -> bool:
        """Whether it is on disk, verified or not."""
        return self._index.get(digest) is not None

    def on_disk(self) -> list[str]:
        """The adapter digests on disk, least recently used first."""
        return self._index.digests()

    def size(self) -> tuple[int, int]:
        """How many adapters and bytes are on disk."""
        return len(self._index), self._index.bytes

    async def _fetch(self, manifest: Manifest, directory: Path) -> None:
        partial = self._beside()
        self._coming += manifest.adapter_bytes
        try:
            await self._make_room()
            partial.mkdir()
            for name, ref in manifest.files.items():
                size = await self._store.size(ref.key)
                if size is not None and size != ref.size:
                    state = "truncated" if size < ref.size else "too long"
                    raise Fatal(f"{name} of {manifest.revision} is {state} in the store: {size} of {ref.size} bytes")
                await self._store.fetch(ref, partial / name)
            proved = await asyncio.to_thread(_proved, partial, manifest, None)
            if proved is None:
                raise Fatal(f"the files fetched for {manifest.revision} are not those of its manifest")
            await self._remove(manifest.adapter_sha256)
            partial.rename(directory)
            self._index.add(manifest.adapter_sha256, manifest.adapter_bytes, proved)
        finally:
            self._coming -= manifest.adapter_bytes
            if partial.exists():
                await asyncio.to_thread(shutil.rmtree, partial)

    async def _make_room(self) -> None:
        while self._index.bytes + self._coming > self._max_bytes:
            oldest = self._index.oldest(self._in_use() | self._locks.keys())
            if oldest is None:
                return
            await self._remove(oldest)

    async def _remove(self, digest: str) -> None:
        """Renamed first, so that its name is free at once and what is half removed is never used."""
        self._index.remove(digest)
        gone = self._beside()
        with contextlib.suppress(FileNotFoundError):
            (self.root / digest).rename(gone)
            await asyncio.to_thread(shutil.rmtree, gone)

    def _beside(self) -> Path:
        return self.root / f"{PARTIAL}{uuid.uuid4().hex}"

    @contextlib.asynccontextmanager
    async def _alone(self, digest: str) -> AsyncIterator[None]:
        """One at a time for each adapter, and nobody removes it meanwhile: revisions may share one."""
        lock, users = self._locks.get(digest, (asyncio.Lock(), 0))
        self._locks[digest] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            users = self._locks[digest][1] - 1
            if users:
                self._locks[digest] = (lock, users)
            else:
                del self._locks[digest]


def is_whole(directory: Path, manifest: Manifest) -> bool:
    """Whether every file of the manifest is in `directory` with its sha256."""
    for name, ref in manifest.files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != ref.size or layout.file_sha256(path) != ref.sha256:
            return False
    return True


def _proved(directory: Path, manifest: Manifest, before: Stamps | None) -> Stamps | None:
    """The stamps under which the files are the manifest's, hashed unless `before` still holds; None when
    they are not. Marks the directory as used, so that a later process knows the order."""
    now = stamps(directory, manifest.files)
    if now is None or (now != before and not is_whole(directory, manifest)):
        return None
    os.utime(directory)
    return now


def _check_manifest(manifest: Manifest) -> None:
    missing = {layout.CONFIG_FILE, layout.TENSOR_FILE} - manifest.files.keys()
    if missing:
        raise Fatal(f"the manifest of {manifest.revision} does not name {' and '.join(sorted(missing))}")
    for name in manifest.files:
        if Path(name).name != name or name.startswith("."):
            raise Fatal(f"the manifest of {manifest.revision} names a file {name!r}; plain names only")
    combined = layout.adapter_sha256({name: ref.sha256 for name, ref in manifest.files.items()})
    if combined != manifest.adapter_sha256:
        raise Fatal(f"the files of {manifest.revision} hash to {combined}, its manifest says {manifest.adapter_sha256}")
