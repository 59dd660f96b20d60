"""One load in its two stages: view → base check → files on disk, then engine → proof.

In flows a revision name, out flow a `Fetched` and a `Loaded`. Bounded attempts in each stage: what a retry
may mend, and what nobody foresaw, is tried again; what it cannot mend is refused at once. Invariant: a
load that raises leaves nothing resident, or what the engine does not let go of leaves before its next load.
The catalog is asked once for a revision as long as its manifest is remembered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from mint_schemas import parse_reference

from services.serving.errors import LoadFailed, Problem, QueueFull, Unavailable, UnknownRevision
from services.serving.fetch import AdapterFiles, Found
from services.serving.readiness import NotProved, Proof, prove
from shared.adapters.manifest import Manifest
from shared.catalog.api import RevisionView
from shared.engine.port import AdapterRefused, Capabilities, EngineDead, InferenceEngine, NotResident, SlotsExhausted
from shared.errors import Fatal, Refused, Retryable
from shared.store.port import BytesDiffer

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 0.1
BAD_FILES_STAND_S = 60.0
MANIFESTS_KEPT = 1024

R = TypeVar("R")


class Revisions(Protocol):
    """The part of the catalog client that a load needs."""

    async def revision(self, reference: str) -> RevisionView: ...


@dataclass(frozen=True)
class Fetched:
    """Files that are whole on local disk; `found` is the tier that they were found in."""

    manifest: Manifest
    directory: Path
    found: Found


@dataclass(frozen=True)
class Loaded:
    manifest: Manifest
    proof: Proof
    engine: InferenceEngine


class Loader:
    """`max_bytes` is what the memory tier holds at most: a larger adapter is refused before it is fetched."""

    def __init__(self, revisions: Revisions, files: AdapterFiles, attempts: int, max_bytes: int) -> None:
        self._revisions, self._files, self._attempts, self._max_bytes = revisions, files, attempts, max_bytes
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()
        self._unproved: dict[str, InferenceEngine] = {}

    async def fetch(self, revision: str, has: Capabilities, expected_sha256: str | None = None) -> Fetched:
        """`expected_sha256`: the adapter that whoever wants the revision named, where one did.

        Raises UnknownRevision, LoadFailed, Unavailable."""

        async def once() -> Fetched:
            manifest = await self._manifest(revision, expected_sha256)
            if expected_sha256 not in (None, manifest.adapter_sha256):
                raise Fatal(
                    f"{revision} is wanted as adapter {expected_sha256}; the catalog has {manifest.adapter_sha256}"
                )
            check_base(manifest, has)
            self._check_size(manifest)
            return Fetched(manifest, *await self._files.ensure(manifest))

        return await self._attempted(revision, once)

    async def activate(self, fetched: Fetched, engine: InferenceEngine) -> Loaded:
        """Raises LoadFailed, Unavailable and QueueFull (for now), EngineDead."""

        async def once() -> Loaded:
            await self._clear_out(engine)
            try:
                report = await engine.load(fetched.manifest, fetched.directory)
            except AdapterRefused as error:
                await self._check_intact(fetched.manifest, error)
                raise
            try:
                proof = prove(fetched.manifest, report, engine.capabilities())
            except NotProved:
                self._unproved[fetched.manifest.revision] = engine
                await self._clear_out(engine)
                raise
            return Loaded(fetched.manifest, proof, engine)

        return await self._attempted(fetched.manifest.revision, once)

    async def _attempted(self, revision: str, once: Callable[[], Awaitable[R]]) -> R:
        for attempt in range(1, self._attempts + 1):
            try:
                return await once()
            except (Problem, EngineDead):
                raise
            except Refused as error:
                if error.status == 404:
                    raise UnknownRevision(f"revision {revision} is not in the catalog: {error}") from error
                raise LoadFailed(f"{revision} was refused: {error}") from error
            except (AdapterRefused, NotProved, Fatal) as error:
                raise LoadFailed(str(error)) from error
            except SlotsExhausted as error:
                raise QueueFull(f"no room for {revision}: {error}") from error
            except Exception as error:
                logger.warning("attempt %d of %d to load %s failed: %s", attempt, self._attempts, revision, error)
                if attempt == self._attempts:
                    raise self._given_up(revision, error) from error
                await asyncio.sleep(RETRY_DELAY_S * attempt)
        raise AssertionError("attempts is at least 1")

    async def _clear_out(self, engine: InferenceEngine) -> None:
        """What was not proved leaves the engine: now, or before its next load where it does not let go."""
        self._unproved = {revision: held for revision, held in self._unproved.items() if held is engine}
        for revision in list(self._unproved):
            try:
                await engine.unload(revision)
            except EngineDead:
                raise
            except NotResident:
                pass
            except Exception as error:
                logger.warning("%s is not proved and cannot be unloaded: %r", revision, error)
                continue
            self._unproved.pop(revision, None)

    async def _check_intact(self, manifest: Manifest, refusal: AdapterRefused) -> None:
        """Files that changed after they were verified say nothing about the revision: fetched again.

        Raises BytesDiffer, so that the engine is asked again."""
        if not await self._files.intact(manifest):
            await self._files.ensure(manifest)
            raise BytesDiffer(f"the files of {manifest.revision} changed on disk and were fetched again") from refusal

    def _check_size(self, manifest: Manifest) -> None:
        if manifest.adapter_bytes > self._max_bytes:
            raise LoadFailed(
                f"{manifest.revision} has {manifest.adapter_bytes} bytes; this replica keeps {self._max_bytes} bytes "
                "of adapters in memory (MINT_SERVING_MEMORY_BYTES)"
            )

    def near(self, revision: str) -> bool:
        """Whether its manifest is known and its files are on disk."""
        manifest = self._manifests.get(revision)
        return manifest is not None and self._files.has(manifest.adapter_sha256)

    async def _manifest(self, revision: str, expected_sha256: str | None) -> Manifest:
        """The catalog's; what it said before is as good, since a revision never changes."""
        _check_numbered(revision)
        known = self._manifests.get(revision)
        if known is not None and expected_sha256 in (None, known.adapter_sha256):
            self._manifests.move_to_end(revision)
            return known
        view = await self._revisions.revision(revision)
        if view.revision != revision or view.adapter_sha256 != view.manifest.adapter_sha256:
            raise Fatal(f"the catalog's row of {revision} and its manifest name different adapters")
        manifest = view.manifest.model_copy(update={"revision": revision})
        self._manifests[revision] = manifest
        while len(self._manifests) > MANIFESTS_KEPT:
            self._manifests.popitem(last=False)
        return manifest

    def _given_up(self, revision: str, error: Exception) -> Problem:
        text = f"{revision} was not loaded after {self._attempts} attempts: {error}"
        elsewhere = isinstance(error, Retryable | OSError) and not isinstance(error, BytesDiffer)
        return Unavailable(text) if elsewhere else LoadFailed(text, BAD_FILES_STAND_S)


def check_base(manifest: Manifest, has: Capabilities) -> None:
    """Before a byte is fetched: raises LoadFailed for an adapter of another base model."""
    if manifest.base_sha256 != has.base_sha256:
        raise LoadFailed(
            f"{manifest.revision} was trained on {manifest.base} ({manifest.base_sha256}); this engine serves "
            f"{has.base_name} ({has.base_sha256}); serve it on its own base"
        )
    if manifest.rank > has.max_rank:
        raise LoadFailed(f"{manifest.revision} has rank {manifest.rank}; this engine serves up to {has.max_rank}")


def _check_numbered(revision: str) -> None:
    try:
        number = parse_reference(revision).number
    except ValueError as error:
        raise UnknownRevision(str(error)) from error
    if number is None:
        raise UnknownRevision(f"{revision} names no revision; serving takes tenant/policy@N")
