"""Wiring: the parts of the gateway from the service's resources, and its routers.

The gateway holds no state but the last resolutions and keys; any number of it may run side by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx
from fastapi import APIRouter

from services.gateway.config import GatewaySettings
from services.gateway.edge import Gateway
from services.gateway.identity import Keys
from services.gateway.resolution import Resolver
from services.gateway.routes import routers
from services.gateway.tokens import Tokens
from shared import open_files
from shared.bases import Base
from shared.catalog.keys import KeysClient
from shared.catalog.operations_client import OperationsClient
from shared.sampling.directory import ReplicaDirectory
from shared.sampling.remote import RemoteSampler
from shared.service import Resources, ServiceApp
from shared.text.codec import TextCodec

__all__ = ["build"]


@dataclass(frozen=True)
class GatewayApp:
    """Healthy for as long as it runs: what else is away, each answer says for itself."""

    routers: Sequence[APIRouter]
    directory: ReplicaDirectory

    async def start(self) -> None:
        await self.directory.start()

    async def stop(self) -> None:
        await self.directory.stop()

    def healthy(self) -> str | None:
        return None


@asynccontextmanager
async def build(resources: Resources) -> AsyncIterator[ServiceApp]:
    settings = resources.settings
    assert isinstance(settings, GatewaySettings)
    # A future that is waited for holds a connection to its client and one to the catalog.
    open_files.allow_more()
    directory = ReplicaDirectory(resources.bus)
    codecs = await asyncio.to_thread(_codecs, resources.bases)
    # A stream holds its connection for as long as it generates, so that a bound here would be one on users.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(limits=limits, trust_env=False))
        # Its own connections: a key is checked also while all the others wait for results.
        key_book = KeysClient(settings.catalog_url)
        stack.push_async_callback(key_book.close)
        # A future that is waited for holds one for as long as it waits.
        operations = OperationsClient(settings.catalog_url, connections=None)
        stack.push_async_callback(operations.close)
        sampler = RemoteSampler(resources.bus, http, directory)
        gateway = Gateway(
            settings=settings,
            keys=Keys(
                settings.gateway_keys, settings.gateway_local_key, key_book, tokens=Tokens(settings.signing_secret)
            ),
            bases=resources.bases,
            codecs=codecs,
            catalog=resources.catalog,
            operations=operations,
            resolver=Resolver(resources.catalog, resources.bases, settings.gateway_resolve_timeout_s),
            sampler=sampler,
            replicas=directory,
            tiers=sampler,
            store=resources.store,
            bus=resources.bus,
        )
        yield GatewayApp(routers(gateway), directory)


def _codecs(bases: Mapping[str, Base]) -> dict[str, TextCodec]:
    return {name: TextCodec.load(base.directory) for name, base in bases.items()}
