"""One load, from the catalog's row to a proof: view → base check → files → engine → proof.

In flows a revision name, out flows a `Loaded`. Bounded attempts: what a retry may mend, and what nobody
foresaw, is tried again; what it cannot mend is refused at once. Invariant: a load that raises leaves nothing resident.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from mint_schemas import parse_reference

from services.serving.errors import LoadFailed, Problem, QueueFull, Unavailable, UnknownRevision
from services.serving.fetch import AdapterFiles
from services.serving.readiness import NotProved, Proof, prove
from shared.adapters.manifest import Manifest
from shared.catalog.api import RevisionView
from shared.engine.port import AdapterRefused, EngineDead, InferenceEngine, SlotsExhausted
from shared.errors import Fatal, Refused, Retryable
from shared.store.port import BytesDiffer

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 0.1
BAD_FILES_STAND_S = 60.0

MakeRoom = Callable[[], Awaitable[None]]


class Revisions(Protocol):
    """The part of the catalog client that a load needs."""

    async def revision(self, reference: str) -> RevisionView: ...


@dataclass(frozen=True)
class Loaded:
    manifest: Manifest
    proof: Proof
    engine: InferenceEngine


class Loader:
    """`make_room` is awaited once the files are there, just before the engine is asked."""

    def __init__(self, revisions: Revisions, files: AdapterFiles, attempts: int) -> None:
        self._revisions, self._files, self._attempts = revisions, files, attempts

    async def load(
        self, revision: str, engine: InferenceEngine, make_room: MakeRoom, expected_sha256: str | None = None
    ) -> Loaded:
        """`expected_sha256`: the adapter that whoever wants the revision named, where one did.

        Raises UnknownRevision, LoadFailed, Unavailable and QueueFull (for now), EngineDead."""
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._once(revision, engine, make_room, expected_sha256)
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

    async def _once(
        self, revision: str, engine: InferenceEngine, make_room: MakeRoom, expected_sha256: str | None
    ) -> Loaded:
        manifest = await self._manifest(revision)
        if expected_sha256 not in (None, manifest.adapter_sha256):
            raise Fatal(f"{revision} is wanted as adapter {expected_sha256}; the catalog has {manifest.adapter_sha256}")
        check_base(manifest, engine)
        directory = await self._files.ensure(manifest)
        await make_room()
        report = await engine.load(manifest, directory)
        try:
            proof = prove(manifest, report, engine.capabilities())
        except NotProved:
            await engine.unload(revision)
            raise
        return Loaded(manifest, proof, engine)

    async def _manifest(self, revision: str) -> Manifest:
        _check_numbered(revision)
        view = await self._revisions.revision(revision)
        if view.revision != revision or view.adapter_sha256 != view.manifest.adapter_sha256:
            raise Fatal(f"the catalog's row of {revision} and its manifest name different adapters")
        return view.manifest.model_copy(update={"revision": revision})

    def _given_up(self, revision: str, error: Exception) -> Problem:
        text = f"{revision} was not loaded after {self._attempts} attempts: {error}"
        elsewhere = isinstance(error, Retryable | OSError) and not isinstance(error, BytesDiffer)
        return Unavailable(text) if elsewhere else LoadFailed(text, BAD_FILES_STAND_S)


def check_base(manifest: Manifest, engine: InferenceEngine) -> None:
    """Before a byte is fetched: raises LoadFailed for an adapter of another base model."""
    has = engine.capabilities()
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
