"""A revision by its number: what the catalog knows, its manifest, and its adapter as an archive.

Invariant: an archive holds the revision's files, verified by sha256 against the manifest, or it is not
sent at all.
"""

from __future__ import annotations

import asyncio
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated

from fastapi import Path as PathParameter
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.identity import Identity
from services.gateway.mint_v1.owned import PolicyPart, TenantPart, owned_policy
from services.gateway.streaming import MadeFile, turn
from shared.adapters.manifest import Manifest
from shared.catalog.api import RevisionView

__all__ = ["revision_archive", "revision_manifest", "show_revision"]

Number = Annotated[int, PathParameter(ge=1, le=999_999_999, examples=[2])]


async def show_revision(
    tenant: TenantPart, policy: PolicyPart, number: Number, gateway: Here, caller: Caller
) -> RevisionView:
    """Where it comes from, what it scores, which aliases point at it, where it is ready."""
    return await _owned_revision(gateway, caller, tenant, policy, number)


async def revision_manifest(
    tenant: TenantPart, policy: PolicyPart, number: Number, gateway: Here, caller: Caller
) -> Manifest:
    """Everything that a loader must know; its `revision` is filled in."""
    view = await _owned_revision(gateway, caller, tenant, policy, number)
    return _numbered(view)


async def revision_archive(
    tenant: TenantPart, policy: PolicyPart, number: Number, request: Request, gateway: Here, caller: Caller
) -> Response:
    """A tar of `manifest.json`, `adapter_config.json` and `adapter_model.safetensors` (PEFT layout)."""
    view = await _owned_revision(gateway, caller, tenant, policy, number)
    directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="mint-archive-"))
    try:
        manifest = _numbered(view)
        async with turn(gateway.heavy, request):
            for name, ref in manifest.files.items():
                await gateway.store.fetch(ref, directory / name)
            archive = await asyncio.to_thread(_pack, directory, manifest)
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, directory, True)
        raise
    return MadeFile(
        archive,
        media_type="application/x-tar",
        filename=f"{tenant}-{policy}-{number}.tar",
        headers={"mint-revision": view.revision, "mint-adapter-sha256": view.adapter_sha256},
    )


def _pack(directory: Path, manifest: Manifest) -> Path:
    (directory / "manifest.json").write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    archive = directory / "archive.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("manifest.json", *sorted(manifest.files)):
            tar.add(directory / name, arcname=name)
    return archive


def _numbered(view: RevisionView) -> Manifest:
    return view.manifest.model_copy(update={"revision": view.revision})


async def _owned_revision(gateway: Gateway, caller: Identity, tenant: str, policy: str, number: int) -> RevisionView:
    return await gateway.catalog.revision(f"{owned_policy(caller, tenant, policy)}@{number}")
