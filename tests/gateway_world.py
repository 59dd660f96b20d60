"""A gateway and a serving replica with the fake engine, over real HTTP and a real bus."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai

from services.gateway.config import GatewaySettings
from services.gateway.edge import Gateway
from services.gateway.identity import Keys
from services.gateway.resolution import Resolver
from services.gateway.routes import routers
from services.gateway.tokens import Tokens
from services.learner.convert_smollm2 import TOKENIZER_FILES
from services.serving.replica import ServingReplica
from shared.bases import Base, load_base
from shared.catalog import api
from shared.errors import Refused
from shared.http import Health, HttpServer
from shared.sampling.remote import RemoteSampler
from shared.store.memory import MemoryStore
from shared.text.codec import TextCodec
from tests.serving_kit import BASE_NAME, BASE_TOKEN, Stage, make_base, until
from tests.tiny import tokenizer_directory
from tests.unit.gateway.kit import FakeBus, FakeCatalog
from tests.unit.gateway.tinker.fake_operations import FakeOperations


class StageCatalog(FakeCatalog):
    """Knows the revisions of a stage by number, and their policies' only revisions as `live`."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._views = stage.catalog.views

    async def resolve(self, reference: str) -> api.ResolvedRevision:
        policy = reference.partition("@")[0].removesuffix(":live")
        revision = reference if "@" in reference else f"{policy}@1"
        if revision not in self._views:
            near = [f"{view.policy}" for view in self._views.values()]
            raise Refused(f"there is no {reference}", "unknown_reference", near, 404)
        return api.ResolvedRevision(
            reference=reference,
            base=BASE_NAME,
            revision=revision,
            adapter_sha256=self._views[revision].adapter_sha256,
            policy=policy,
            alias=None if "@" in reference else "live",
            alias_version=None if "@" in reference else 1,
        )

    async def revision(self, reference: str) -> api.RevisionView:
        return self._views[reference]


@dataclass
class World:
    stage: Stage
    replica: ServingReplica
    url: str

    def client(self, key: str = "tml-dev") -> openai.AsyncOpenAI:
        http = httpx2.AsyncClient(trust_env=False)
        return openai.AsyncOpenAI(api_key=key, base_url=f"{self.url}/v1", max_retries=0, http_client=http)

    async def residency(self, key: str = "tml-dev") -> dict[str, Any]:
        """Of the one replica."""
        async with httpx.AsyncClient(trust_env=False, headers={"authorization": f"Bearer {key}"}) as http:
            (found,) = (await http.get(f"{self.url}/v1/residency")).raise_for_status().json()["data"]
        return dict(found)

    async def idle(self) -> None:
        """Wait until the replica has nothing in flight, by its own count and by what it reports."""
        await until(lambda: self.replica.sampler.in_flight == 0)
        assert (await self.residency())["in_flight"] == 0


@asynccontextmanager
async def _serving(stage: Stage) -> AsyncIterator[ServingReplica]:
    listener = socket.create_server(("127.0.0.1", 0))
    stage.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    replica = stage.replica()
    async with HttpServer(Health("serving"), listener) as server:
        for router in replica.routers:
            server.app.include_router(router)
        await replica.start()
        try:
            await until(lambda: replica.healthy() is None, lambda: str(replica.healthy()))
            yield replica
        finally:
            await replica.stop()


@asynccontextmanager
async def _gateway(stage: Stage, codec: TextCodec) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    settings = GatewaySettings(gateway_keys={"key-acme": "acme", "key-beta": "beta"})
    catalog, bases, store = StageCatalog(stage), {BASE_NAME: stage.base}, MemoryStore()
    async with httpx.AsyncClient(trust_env=False) as http:
        sampler = RemoteSampler(stage.bus, http)
        parts = Gateway(
            settings=settings,
            keys=Keys(settings.gateway_keys, settings.gateway_local_key, tokens=Tokens("a secret")),
            bases=bases,
            codecs={BASE_NAME: codec},
            catalog=catalog,
            operations=FakeOperations(store),
            resolver=Resolver(catalog, bases, settings.gateway_resolve_timeout_s),
            sampler=sampler,
            replicas=sampler.directory,
            tiers=sampler,
            store=store,
            bus=FakeBus(),
        )
        async with HttpServer(Health("gateway"), listener) as server:
            for router in routers(parts):
                server.app.include_router(router)
            await sampler.start()
            await until(lambda: sampler.directory.replicas(BASE_NAME))
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        await sampler.stop()


@asynccontextmanager
async def world(stage: Stage, codec: TextCodec) -> AsyncIterator[World]:
    async with _serving(stage) as replica, _gateway(stage, codec) as url:
        yield World(stage, replica, url)


def worded_base(directory: Path) -> Base:
    """The kit's base with SmolLM2's vocabulary, tokenizer and chat template."""
    make_base(directory)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_directory() / name, directory / name)
    config = {"vocab_size": 49152, "max_position_embeddings": 1024, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config))
    return load_base(BASE_NAME, BASE_TOKEN, directory)
