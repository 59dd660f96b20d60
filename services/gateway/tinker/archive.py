"""A checkpoint as a PEFT directory, and that as a `.tar.gz` behind a signed link.

In: a path of sampler weights (the files of its revision) or of training weights (converted to the serving layout).
Out: a redirect, then the archive. Invariants: what is sent is whole and verified by sha256, and equal checkpoints have
equal archives; a link opens what the key that asked for it may read, and no longer.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from fastapi import Path as PathParameter
from fastapi import Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.streaming import MadeFile, turn
from services.gateway.tinker.rest.paths import checkpoint_path
from services.gateway.tinker.rest.signing import LIFETIME_S, Signer
from shared.adapters import layout
from shared.adapters.peft_dir import COMPLETE_FILE, pack, serving_layout
from shared.catalog.operations import PathView
from shared.errors import Fatal
from shared.rl.checkpoint import ADAPTER_FILE

__all__ = ["archive_link", "put_peft", "send_archive"]

RunId = Annotated[str, PathParameter(max_length=300)]
Expires = Annotated[int, Query(ge=0, le=10**12)]
Signature = Annotated[str, Query(max_length=200)]
Tenant = Annotated[str, Query(max_length=63)]


async def archive_link(
    run_id: RunId, kind: str, name: str, request: Request, gateway: Here, caller: Caller
) -> Response:
    """302 to a link that works without a key for a quarter of an hour; `Expires` says until when."""
    path = checkpoint_path(run_id, kind, name)
    await gateway.operations.resolve_path(str(path), caller.tenant)
    expires = int(time.time()) + LIFETIME_S
    tenant = caller.tenant or ""
    signature = _signer(gateway).sign(str(path), tenant, expires)
    place = "/".join(quote(part, safe=":") for part in (path.model_id, path.kind, f"{path.name}.tar.gz"))
    proof = f"tenant={tenant}&expires={expires}&signature={signature}"
    link = f"{request.base_url}api/v1/archives/{place}?{proof}"
    until = format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True)
    return RedirectResponse(link, 302, {"expires": until, "cache-control": "no-store"})


async def send_archive(
    run_id: RunId,
    kind: str,
    file: str,
    tenant: Tenant,
    expires: Expires,
    signature: Signature,
    request: Request,
    gateway: Here,
) -> Response:
    """What `archive_link` points at. The signature stands for a key; what that may not read now, this does not open."""
    path = checkpoint_path(run_id, kind, file.removesuffix(".tar.gz"))
    _signer(gateway).check(str(path), tenant, expires, signature, time.time())
    view = await gateway.operations.resolve_path(str(path), tenant or None)
    directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="mint-peft-"))
    try:
        archive = directory / "archive.tar.gz"
        async with turn(gateway.heavy, request):
            files = await put_peft(gateway, view, directory)
            files[COMPLETE_FILE] = directory / COMPLETE_FILE
            await asyncio.to_thread(files[COMPLETE_FILE].touch)
            await asyncio.to_thread(pack, files, archive)
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, directory, True)
        raise
    return MadeFile(archive, media_type="application/gzip", filename=f"{path.name}.tar.gz")


async def put_peft(gateway: Gateway, path: PathView, directory: Path) -> dict[str, Path]:
    """Write `adapter_config.json` and `adapter_model.safetensors` of a path to `directory`, verified."""
    files = {name: directory / name for name in (layout.CONFIG_FILE, layout.TENSOR_FILE)}
    if path.revision is not None:
        manifest = (await gateway.catalog.revision(path.revision)).manifest
        for name, place in files.items():
            await gateway.store.fetch(manifest.files[name], place)
        return files
    if path.checkpoint is None or ADAPTER_FILE not in path.checkpoint.files:
        raise Fatal(f"{path.path} has neither a revision nor a training checkpoint with an adapter")
    training = await gateway.store.get(path.checkpoint.files[ADAPTER_FILE])
    await asyncio.to_thread(_convert, training, path, files)
    return files


def _convert(training: bytes, path: PathView, files: dict[str, Path]) -> None:
    lora = path.lora
    config = layout.config_bytes(path.base, lora.rank, lora.alpha, lora.use_rslora, lora.target_modules)
    files[layout.CONFIG_FILE].write_bytes(config)
    files[layout.TENSOR_FILE].write_bytes(serving_layout(training))


def _signer(gateway: Gateway) -> Signer:
    return Signer(gateway.settings.signing_secret)
