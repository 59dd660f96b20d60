"""POST /mint/v1/adapters: a PEFT adapter made elsewhere becomes a revision that can be served and trained on.

In: the references of its two files, uploaded with POST /mint/v1/data before. Out: its `tinker://` path and revision.
Invariant: files first, under their content, the catalog's row last; the same adapter under the same name again is
the same path.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from pathlib import Path
from typing import Annotated

from mint_schemas.common import FileRef
from mint_schemas.training import Lora
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.identity import Identity
from services.gateway.streaming import turn
from services.gateway.tinker.rest.paths import checked_name
from shared.adapters.host import host_of
from shared.adapters.importing import Adopted, Foreign, adopt, read_foreign
from shared.adapters.layout import CONFIG_FILE, TENSOR_FILE, canonical_json
from shared.catalog.operations import ImportPath, OperationView, PathView
from shared.engine.port import AdapterRefused
from shared.errors import Refused, Retryable
from shared.operations.content import read
from shared.operations.payload import SavedResult, decode
from shared.store import keys
from shared.store.port import ObjectMissing

__all__ = ["ImportAdapter", "ImportedAdapter", "import_adapter", "put_adopted", "saved_path"]

MAX_CONFIG_BYTES = 1 << 20
WAIT_S = 20.0


class ImportAdapter(BaseModel):
    """`config` and `tensors` as POST /mint/v1/data answered for `adapter_config.json` and
    `adapter_model.safetensors`. Rank, alpha, rsLoRA and target modules are the config's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    base: Annotated[str, Field(max_length=200)]
    name: Annotated[str, Field(max_length=200)]
    config: FileRef
    tensors: FileRef
    tenant: Annotated[str, Field(max_length=63, description="for a key that acts for every tenant")] | None = None


class ImportedAdapter(BaseModel):
    model_config = ConfigDict(frozen=True)
    path: str
    revision: str | None
    base: str
    lora: Lora
    adapter_sha256: str
    size_bytes: int


async def import_adapter(body: ImportAdapter, request: Request, gateway: Here, caller: Caller) -> ImportedAdapter:
    """Answers once it is a revision that can be served and a training checkpoint that can be trained on."""
    owner = caller.scope(body.tenant) or gateway.settings.gateway_local_tenant
    name = checked_name(body.name, "name")
    if body.base not in gateway.bases:
        known = ", ".join(sorted(gateway.bases))
        raise Refused(f"there is no base model {body.base[:80]!r}; this server has {known}", "unknown_base", status=404)
    async with turn(gateway.heavy, request):
        with tempfile.TemporaryDirectory(prefix="mint-import-") as scratch:
            await _fetch(gateway, owner, body, Path(scratch))
            adopted = await asyncio.to_thread(_admitted, gateway, body.base, Path(scratch))
        sha256 = adopted.manifest.adapter_sha256
        digest = hashlib.sha256(canonical_json(["import", body.base, name, sha256])).hexdigest()
        found = await put_adopted(gateway, caller, owner, name, adopted, digest)
    path = await saved_path(gateway, owner, await gateway.operations.import_path(found))
    return ImportedAdapter(
        path=path.path,
        revision=path.revision,
        base=path.base,
        lora=path.lora,
        adapter_sha256=sha256,
        size_bytes=path.size_bytes,
    )


async def put_adopted(
    gateway: Gateway, caller: Identity, owner: str, name: str, adopted: Adopted, digest: str
) -> ImportPath:
    """Store its files and return what to ask the catalog."""
    files = {}
    for file, data in adopted.files.items():
        sha256 = await asyncio.to_thread(hashlib.sha256, data)
        files[file] = await gateway.store.put(keys.blob(sha256.hexdigest()), data)
    return ImportPath(
        tenant=owner,
        actor=caller.actor,
        session_id=None,
        base=adopted.manifest.base,
        name=name,
        files=files,
        manifest=adopted.manifest,
        digest=digest,
    )


async def saved_path(gateway: Gateway, owner: str, view: OperationView) -> PathView:
    """The path that an import made. Raises Refused in the words of its failure, Retryable while it is not done."""
    if view.state not in ("done", "failed"):
        view = await gateway.operations.operation(view.request_id, owner, WAIT_S)
    if view.failure is not None:
        raise Refused(view.failure.message, "import_failed")
    if view.result is None:
        raise Retryable(f"the import {view.request_id} is not done yet; send the same request again")
    result = decode(await read(gateway.store, view.result))
    if not isinstance(result, SavedResult):
        raise Retryable(f"the import {view.request_id} has no path yet; send the same request again")
    return await gateway.operations.resolve_path(result.path, owner)


async def _fetch(gateway: Gateway, owner: str, body: ImportAdapter, scratch: Path) -> None:
    """Only what this tenant uploaded, under its own hash, is read."""
    for field, ref, name in (("config", body.config, CONFIG_FILE), ("tensors", body.tensors, TENSOR_FILE)):
        bound = MAX_CONFIG_BYTES if name == CONFIG_FILE else gateway.settings.gateway_max_upload_bytes
        missing = Refused(f"{field}: {owner} uploaded no such file; POST it to /mint/v1/data first", "unknown_data")
        if ref.key != keys.data(owner, ref.sha256):
            raise missing
        if not 0 < ref.size <= bound:
            raise Refused(f"{field}: the file has {ref.size} bytes; 1 to {bound} are allowed", "too_large")
        if await gateway.store.size(ref.key) != ref.size:
            raise missing
        try:
            await gateway.store.fetch(ref, scratch / name)
        except ObjectMissing as error:
            raise missing from error


def _admitted(gateway: Gateway, base: str, scratch: Path) -> Adopted:
    host = host_of(gateway.bases[base])
    try:
        foreign = read_foreign(scratch, host)
    except AdapterRefused as error:
        raise Refused(str(error), "adapter_refused") from error
    _check_base(gateway, base, foreign)
    return adopt(foreign.tensors, foreign.lora, host)


def _check_base(gateway: Gateway, base: str, foreign: Foreign) -> None:
    """Its config may call the base whatever it likes, but not by another base's name."""
    if foreign.base != base and foreign.base in gateway.bases:
        raise Refused(f"the adapter was made for {foreign.base}, the request names {base}", "other_base")
