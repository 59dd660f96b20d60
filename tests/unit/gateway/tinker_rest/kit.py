"""The REST surface over a small catalog in memory, a store in memory and a base of two layers."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from fastapi import FastAPI
from mint_schemas.commands import CheckpointRef
from mint_schemas.training import Lora

from services.gateway.edge import EdgeRoute, edge_routes
from services.gateway.tinker.errors import tinker_answer
from services.gateway.tinker.rest.routes import adapters_router, rest_router
from shared.adapters import layout
from shared.adapters.host import Host, host_of
from shared.adapters.importing import Adopted, adopt
from shared.adapters.manifest import Manifest
from shared.bases import Base
from shared.catalog import api
from shared.catalog import operations as ops
from shared.errors import Refused
from shared.http import Traced
from shared.operations.payload import SavedResult, encode
from shared.store import keys
from shared.store.memory import MemoryStore
from tests.adapters import lora_tensors
from tests.unit.gateway.kit import Kit

BASE = "some/base"
LORA = Lora(rank=2, alpha=32.0, target_modules=("q_proj", "down_proj"))
RUN = "s1:train:0"
AT = 1_700_000_000.0


def small_base(directory: Path) -> Base:
    """Two layers of two projections; attention is [6, 4], the feed-forward [4, 10]."""
    directory.mkdir(parents=True)
    weights = {"model.embed_tokens.weight": np.zeros((20, 4), np.float32)}
    for layer in (0, 1):
        weights[f"model.layers.{layer}.self_attn.q_proj.weight"] = np.zeros((6, 4), np.float32)
        weights[f"model.layers.{layer}.mlp.down_proj.weight"] = np.zeros((4, 10), np.float32)
    (directory / "model.safetensors").write_bytes(layout.tensor_file_bytes(weights))
    return Base(
        name=BASE,
        token="some-base",
        directory=directory,
        max_rank=4,
        target_modules=("q_proj", "down_proj"),
        sha256="1" * 64,
        tokenizer_sha256="2" * 64,
        chat_template_sha256="3" * 64,
        max_context=64,
        bytes=1,
    )


def saved(result: SavedResult) -> ops.Content:
    return ops.Content(inline=base64.b64encode(encode(result)))


class FakeOperations:
    """Tenants see their own and what is published; `submitted` lists operations; an import of the same name and
    digest is the same operation."""

    def __init__(self) -> None:
        self.session_views: dict[str, ops.SessionView] = {}
        self.model_views: dict[str, ops.ModelView] = {}
        self.path_views: dict[str, ops.PathView] = {}
        self.submitted: list[ops.Submit] = []
        self.imported: list[ops.ImportPath] = []
        self.operation_views: dict[str, ops.OperationView] = {}
        self.finished: list[str] = []

    def add_model(self, model_id: str = RUN, tenant: str = "acme", at: float = AT, **changes: Any) -> ops.ModelView:
        view = ops.ModelView(
            model_id=model_id,
            session_id=model_id.split(":")[0],
            tenant=tenant,
            run_id=hashlib.sha256(model_id.encode()).hexdigest()[:32],
            policy=f"{tenant}/tinker-{hashlib.sha256(model_id.encode()).hexdigest()[:12]}",
            base=BASE,
            lora=LORA,
            train_unembed=True,
            state="active",
            step=0,
            last_seq_id=0,
            created_at=at,
            last_request_at=at + 1,
            **changes,
        )
        self.model_views[model_id] = view
        return view

    def add_session(self, session_id: str, tenant: str = "acme", **said: Any) -> ops.SessionView:
        view = ops.SessionView(session_id=session_id, tenant=tenant, state="open", created_at=AT, seen_at=AT, **said)
        self.session_views[session_id] = view
        return view

    def add_path(self, name: str, kind: str = "weights", model_id: str = RUN, **changes: Any) -> ops.PathView:
        view = ops.PathView(
            **{
                "path": f"tinker://{model_id}/{kind}/{name}", "model_id": model_id, "tenant": "acme", "kind": kind,
                "name": name, "base": BASE, "lora": LORA, "train_unembed": False, "revision": None,
                "checkpoint": None, "has_optimizer": False, "size_bytes": 100,
                "created_at": AT + len(self.path_views), "expires_at": None, "published": False, **changes,
            }
        )  # fmt: skip
        self.path_views[view.path] = view
        return view

    def _own(self, views: dict[str, Any], key: str, tenant: str | None) -> Any:
        view = views.get(key)
        if view is None or (tenant is not None and view.tenant != tenant):
            raise Refused(f"there is no {key}", "not_found", [], 404)
        return view

    async def new_session(self, request: ops.NewSession) -> ops.SessionView:
        said = request.model_dump(include={"tags", "user_metadata"})
        return self.add_session(f"s{len(self.session_views) + 100}", request.tenant, **said)

    async def finish_session(self, session_id: str, request: ops.FinishSession) -> ops.SessionView:
        self.finished.append(session_id)
        return self._own(self.session_views, session_id, request.tenant)

    async def sessions(self, tenant: str | None = None, limit: int = 20, offset: int = 0) -> ops.SessionPage:
        found = [view for view in self.session_views.values() if tenant in (None, view.tenant)]
        return ops.SessionPage(items=found[offset : offset + limit], total=len(found))

    async def session(self, session_id: str, tenant: str | None = None) -> ops.SessionView:
        return self._own(self.session_views, session_id, tenant)

    async def new_model(self, request: ops.NewModel) -> ops.OperationView:
        self._own(self.session_views, request.session_id, request.tenant)
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        self.add_model(model_id, request.tenant or "")
        return ops.OperationView(request_id=f"create-{model_id}", kind="create_model", state="done", model_id=model_id)

    async def model(self, model_id: str, tenant: str | None = None) -> ops.ModelView:
        return self._own(self.model_views, model_id, tenant)

    async def models(self, tenant: str | None = None, limit: int = 20, offset: int = 0) -> ops.ModelPage:
        found = [view for view in self.model_views.values() if tenant in (None, view.tenant)]
        found.sort(key=lambda view: -view.created_at)
        return ops.ModelPage(items=found[offset : offset + limit], total=len(found))

    async def submit(self, request: ops.Submit) -> ops.OperationView:
        self._own(self.model_views, request.model_id, request.tenant)
        self.submitted.append(request)
        return ops.OperationView(
            request_id=f"op-{len(self.submitted)}", kind=request.kind, state="queued", model_id=request.model_id
        )

    async def operation(self, request_id: str, tenant: str | None = None, wait_s: float = 0.0) -> ops.OperationView:
        return self.operation_views[request_id]

    async def paths(
        self, tenant: str | None = None, model_id: str | None = None, limit: int = 100, offset: int = 0
    ) -> ops.PathPage:
        found = [view for view in self.path_views.values() if tenant in (None, view.tenant)]
        found = [view for view in found if model_id in (None, view.model_id)]
        found.sort(key=lambda view: view.created_at, reverse=model_id is None)
        return ops.PathPage(items=found[offset : offset + limit], total=len(found))

    async def resolve_path(self, path: str, tenant: str | None = None) -> ops.PathView:
        view = self.path_views.get(path)
        return view if view is not None and view.published else self._own(self.path_views, path, tenant)

    async def change_path(self, request: ops.ChangePath) -> ops.PathView:
        view = self._own(self.path_views, request.path, request.tenant)
        if request.published is not None:
            view = view.model_copy(update={"published": request.published})
        if request.ttl_s is not None:
            view = view.model_copy(update={"expires_at": AT + request.ttl_s if request.ttl_s else None})
        self.path_views[request.path] = view
        return view

    async def copy_path(self, request: ops.CopyPath) -> ops.PathView:
        source = await self.resolve_path(request.source, request.tenant)
        model_id = request.target.removeprefix("tinker://").split("/")[0]
        self._own(self.model_views, model_id, request.tenant)
        if request.target in self.path_views:
            raise Refused(f"{request.target} exists already", "path_taken", [], 409)
        changes = {"path": request.target, "model_id": model_id, "tenant": request.tenant, "published": False}
        self.path_views[request.target] = source.model_copy(update=changes)
        return self.path_views[request.target]

    async def import_path(self, request: ops.ImportPath) -> ops.OperationView:
        model_id = f"import-{request.tenant}-{request.name}"
        path = f"tinker://{model_id}/sampler_weights/{request.name}"
        known = [one for one in self.imported if (one.tenant, one.name) == (request.tenant, request.name)]
        if known and known[0].digest != request.digest:
            raise Refused(f"{request.name} is taken", "path_taken", [], 409)
        if not known:
            self.imported.append(request)
            manifest = request.manifest
            lora = Lora(
                rank=manifest.rank, alpha=manifest.alpha, use_rslora=manifest.use_rslora,
                target_modules=manifest.target_modules,
            )  # fmt: skip
            training = {name: request.files[name] for name in ("adapter.safetensors", "state.json")}
            self.add_path(
                request.name, "sampler_weights", model_id, tenant=request.tenant, lora=lora,
                checkpoint=CheckpointRef(files=training, step=0), size_bytes=manifest.adapter_bytes,
            )  # fmt: skip
        result = saved(SavedResult(path=path, note=request.note))
        return ops.OperationView(request_id=f"import-{request.name}", kind=request.kind, state="done", result=result)

    async def delete_path(self, path: str, tenant: str | None = None) -> None:
        self._own(self.path_views, path, tenant)
        del self.path_views[path]


class FakeRevisions:
    """`manifests` by revision."""

    def __init__(self) -> None:
        self.manifests: dict[str, Manifest] = {}

    async def revision(self, reference: str) -> api.RevisionView:
        manifest = self.manifests[reference]
        policy, _, number = reference.partition("@")
        return api.RevisionView(
            revision=reference, number=int(number), policy=policy, base=manifest.base, run_id="r", step=1,
            parent=None, adapter_sha256=manifest.adapter_sha256, adapter_bytes=manifest.adapter_bytes,
            zero_delta=manifest.zero_delta, created_at="2026-01-01T00:00:00Z", aliases=(), manifest=manifest,
        )  # fmt: skip


class World:
    """One gateway with the routes of this surface alone. Keys: `key-acme`, `key-beta`, and `tml-dev` for all."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        kit = Kit(gateway_keys={"key-acme": "acme", "key-beta": "beta"}, **settings)
        self.base = small_base(directory / "base")
        self.operations, self.revisions, self.store = FakeOperations(), FakeRevisions(), MemoryStore()
        self.gateway = parts = replace(
            kit.gateway,
            operations=self.operations,
            catalog=self.revisions,
            store=self.store,
            bases={BASE: self.base},
        )

        class Route(EdgeRoute):
            gateway = parts
            render = staticmethod(tinker_answer)

        self.app = FastAPI()
        self.app.add_middleware(Traced)
        self.app.include_router(rest_router(Route))
        self.app.include_router(adapters_router(edge_routes(parts)[1]))

    @property
    def host(self) -> Host:
        return host_of(self.base)

    def http(self, key: str = "key-acme") -> httpx2.AsyncClient:
        transport = httpx2.ASGITransport(self.app, client=("127.0.0.1", 50000))
        headers = {"x-api-key": key} if key else {}
        return httpx2.AsyncClient(transport=transport, base_url="http://gateway", headers=headers)

    def tensors(self, seed: int = 0, rank: int = 2) -> dict[str, layout.Array]:
        return lora_tensors(self.base, rank, seed, std=0.5)

    def adopted(self, seed: int = 0, lora: Lora = LORA) -> Adopted:
        return adopt(self.tensors(seed, lora.rank), lora, self.host)

    async def put(self, adopted: Adopted) -> dict[str, Any]:
        refs = {}
        for name, data in adopted.files.items():
            refs[name] = await self.store.put(keys.blob(hashlib.sha256(data).hexdigest()), data)
        return refs

    async def sampler_path(self, name: str, seed: int = 0, lora: Lora = LORA, **changes: Any) -> ops.PathView:
        """A path of sampler weights, with its revision in the catalog and its files in the store."""
        adopted = self.adopted(seed, lora)
        await self.put(adopted)
        revision = f"acme/p@{len(self.revisions.manifests) + 1}"
        self.revisions.manifests[revision] = adopted.manifest
        return self.operations.add_path(name, "sampler_weights", revision=revision, lora=lora, **changes)

    async def training_path(self, name: str, seed: int = 0, lora: Lora = LORA) -> ops.PathView:
        refs = await self.put(self.adopted(seed, lora))
        checkpoint = CheckpointRef(files={n: refs[n] for n in ("adapter.safetensors", "state.json")}, step=1)
        return self.operations.add_path(name, "weights", checkpoint=checkpoint, lora=lora)


def unpacked(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        return {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]
