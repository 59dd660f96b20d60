"""The exporter's job: one `export.requested` becomes two blobs and a manifest.

Reads the committed training checkpoint that the command names, converts it in a thread, writes blobs by
content and the manifest under the attempt. Invariant: equal checkpoints give equal blobs, so exporting
twice stores nothing twice.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from mint_schemas.commands import ExportRequested
from mint_schemas.common import FileRef

from services.exporter.convert import Exported, convert
from shared.adapters.host import Host
from shared.adapters.layout import canonical_json
from shared.catalog.api import ExportResult
from shared.errors import Fatal
from shared.rl.checkpoint import ADAPTER_FILE, PROBE_FILE, STATE_FILE
from shared.store.port import ObjectStore
from shared.telemetry import span, spans

MANIFEST_FILE = "manifest.json"


class Files(Protocol):
    """The attempt's files (`shared/worker`)."""

    async def put(self, name: str, data: bytes) -> FileRef: ...

    async def put_blob(self, data: bytes) -> FileRef: ...


class Lease(Protocol):
    def check(self) -> None: ...


class ExportJob:
    """Callable as a worker's job. `hosts` by public base name."""

    def __init__(self, hosts: Mapping[str, Host], store: ObjectStore) -> None:
        self._hosts, self._store = hosts, store

    async def __call__(self, command: ExportRequested, files: Files, lease: Lease) -> ExportResult:
        started = time.monotonic()
        host = self._hosts.get(command.base)
        if host is None:
            raise Fatal(f"this exporter has no base {command.base!r}; it knows {', '.join(sorted(self._hosts))}")
        read = await self._read(command)
        with span(spans.EXPORT, attributes={"mint.policy": command.policy, "mint.step": command.step}):
            exported = await asyncio.to_thread(_convert, command, read, host)
        lease.check()
        for data in exported.files.values():
            await files.put_blob(data)
        manifest = await files.put(MANIFEST_FILE, canonical_json(exported.manifest.model_dump(mode="json")))
        return ExportResult(manifest=manifest, content=exported.manifest, seconds=time.monotonic() - started)

    async def _read(self, command: ExportRequested) -> dict[str, bytes]:
        committed = command.checkpoint.files
        missing = {ADAPTER_FILE, STATE_FILE} - committed.keys()
        if missing:
            raise Fatal(f"the training checkpoint of step {command.step} has no {', '.join(sorted(missing))}")
        wanted = [name for name in (ADAPTER_FILE, STATE_FILE, PROBE_FILE) if name in committed]
        return {name: await self._store.get(committed[name]) for name in wanted}


def _convert(command: ExportRequested, files: Mapping[str, bytes], host: Host) -> Exported:
    with tempfile.TemporaryDirectory(prefix="mint-export-") as scratch:
        return convert(command, files, host, Path(scratch))
