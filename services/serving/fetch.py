"""The disk tier: adapter files near the engine, one directory per adapter_sha256.

In flow manifests, out flow directories in serving layout. Invariant: a directory that has its final
name is whole and was verified; it is made under another name and renamed. Files that an engine holds
stay, since engines may read them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Set
from pathlib import Path

from shared.adapters import layout
from shared.adapters.manifest import Manifest
from shared.errors import Fatal
from shared.store.port import ObjectStore

logger = logging.getLogger(__name__)

PARTIAL = ".partial-"


class AdapterFiles:
    """`in_use` names the adapter digests that must stay on disk; `max_bytes` bounds the rest."""

    def __init__(self, store: ObjectStore, root: Path, max_bytes: int, in_use: Callable[[], Set[str]]) -> None:
        self._store, self.root, self._max_bytes, self._in_use = store, root, max_bytes, in_use
        root.mkdir(parents=True, exist_ok=True)
        for path in root.glob(f"{PARTIAL}*"):
            shutil.rmtree(path)

    async def ensure(self, manifest: Manifest) -> Path:
        """The directory with the manifest's files, fetched unless it is there and still verifies.

        Raises Fatal for a manifest that contradicts itself or names files that the store does not have
        in that size, Retryable (from the store) for a cut download."""
        self._check_manifest(manifest)
        directory = self.root / manifest.adapter_sha256
        if directory.is_dir():
            if await asyncio.to_thread(is_whole, directory, manifest):
                os.utime(directory)
                return directory
            logger.warning("adapter %s changed on disk; fetching it again", manifest.adapter_sha256)
            await asyncio.to_thread(shutil.rmtree, directory)
        await self._make_room(manifest.adapter_bytes)
        await self._fetch(manifest, directory)
        return directory

    def on_disk(self) -> list[str]:
        """The adapter digests on disk, least recently used first."""
        found = []
        for path in self.root.iterdir():
            # Another thread may be removing it just now.
            with contextlib.suppress(FileNotFoundError):
                if not path.name.startswith(PARTIAL):
                    found.append((path.stat().st_mtime, path.name))
        return [name for _, name in sorted(found)]

    async def _fetch(self, manifest: Manifest, directory: Path) -> None:
        partial = self.root / f"{PARTIAL}{uuid.uuid4().hex}"
        partial.mkdir()
        try:
            for name, ref in manifest.files.items():
                size = await self._store.size(ref.key)
                if size is not None and size != ref.size:
                    state = "truncated" if size < ref.size else "too long"
                    raise Fatal(f"{name} of {manifest.revision} is {state} in the store: {size} of {ref.size} bytes")
                await self._store.fetch(ref, partial / name)
            if not await asyncio.to_thread(is_whole, partial, manifest):
                raise Fatal(f"the files fetched for {manifest.revision} are not those of its manifest")
            partial.rename(directory)
        finally:
            if partial.exists():
                await asyncio.to_thread(shutil.rmtree, partial)

    async def _make_room(self, needed: int) -> None:
        protected = self._in_use()
        sizes = {digest: directory_bytes(self.root / digest) for digest in self.on_disk()}
        total = sum(sizes.values()) + needed
        for digest, size in sizes.items():
            if total <= self._max_bytes:
                return
            if digest not in protected:
                with contextlib.suppress(FileNotFoundError):
                    await asyncio.to_thread(shutil.rmtree, self.root / digest)
                total -= size

    def _check_manifest(self, manifest: Manifest) -> None:
        missing = {layout.CONFIG_FILE, layout.TENSOR_FILE} - manifest.files.keys()
        if missing:
            raise Fatal(f"the manifest of {manifest.revision} does not name {' and '.join(sorted(missing))}")
        for name in manifest.files:
            if Path(name).name != name or name.startswith("."):
                raise Fatal(f"the manifest of {manifest.revision} names a file {name!r}; plain names only")
        combined = layout.adapter_sha256({name: ref.sha256 for name, ref in manifest.files.items()})
        if combined != manifest.adapter_sha256:
            raise Fatal(
                f"the files of {manifest.revision} hash to {combined}, its manifest says {manifest.adapter_sha256}"
            )


def is_whole(directory: Path, manifest: Manifest) -> bool:
    """Whether every file of the manifest is in `directory` with its sha256."""
    for name, ref in manifest.files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != ref.size or layout.file_sha256(path) != ref.sha256:
            return False
    return True


def directory_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
