"""Wiring: settings and resources → one serving replica for the service shell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.serving.config import ServingSettings
from services.serving.limits import Bound, LimitSettings
from services.serving.replica import Options, ServingReplica, Surroundings
from services.serving.residency import Limits
from services.serving.status import Identity
from services.serving.supervise import CreateEngine
from services.serving.turns import TurnBounds
from shared.bases import Base
from shared.engine.children import RECORD_FILE, end_orphans
from shared.engine.create import create_engine
from shared.engine.port import InferenceEngine
from shared.engine.settings import EngineSettings
from shared.errors import Fatal
from shared.service import Resources


@asynccontextmanager
async def build(resources: Resources) -> AsyncIterator[ServingReplica]:
    settings = resources.settings
    if not isinstance(settings, ServingSettings):
        raise Fatal(f"serving needs ServingSettings, not {type(settings).__name__}")
    base = base_of(settings, resources.bases)
    name = settings.serving_replica or f"{base.token}-0"
    options = Options(
        directory=settings.data_dir / "serving" / name,
        limits=Limits(
            capacity=settings.serving_max_resident,
            memory_bytes=settings.serving_memory_bytes,
            eviction=settings.serving_eviction,
            queue_depth=settings.serving_queue_depth,
            fetches=settings.serving_fetches,
            activations=settings.serving_activations,
            activation_share=settings.serving_activation_share,
            load_wait_s=settings.serving_load_wait_s,
        ),
        disk_bytes=settings.serving_disk_bytes,
        load_attempts=settings.serving_load_attempts,
        turns=TurnBounds(settings.serving_max_running, settings.serving_max_waiting, settings.serving_wait_s),
        requests=LimitSettings(
            tenant=Bound(concurrency=settings.serving_tenant_concurrency, rate=settings.serving_tenant_rate),
            policy=Bound(concurrency=settings.serving_policy_concurrency, rate=settings.serving_policy_rate),
            named=settings.serving_limits,
        ),
    )
    identity = Identity(name, settings.serving_url or resources.url, base)
    around = Surroundings(resources.bus, resources.store, resources.catalog)
    yield ServingReplica(identity, around, engine_factory(settings, base, options), options)


def base_of(settings: ServingSettings, bases: dict[str, Base]) -> Base:
    """Raises Fatal naming the configured bases."""
    try:
        return bases[settings.serving_base]
    except KeyError:
        raise Fatal(
            f"MINT_SERVING_BASE is {settings.serving_base!r}; {settings.bases_file} has {', '.join(sorted(bases))}"
        ) from None


def engine_factory(settings: ServingSettings, base: Base, options: Options) -> CreateEngine:
    engine = EngineSettings(
        state_dir=options.directory / "engine",
        dtype=settings.serving_dtype,
        slots=settings.serving_slots,
        max_resident=settings.serving_max_resident,
        max_rank=settings.serving_max_rank,
        kv_cache_bytes=settings.serving_kv_bytes,
        max_context=settings.serving_max_context,
        threads=settings.serving_threads,
    )

    def start() -> InferenceEngine:
        # Whatever engine a killed predecessor had: its children hold the memory that this one needs.
        end_orphans(engine.state_dir / RECORD_FILE)
        return create_engine(settings.serving_engine, base, engine)

    async def create() -> InferenceEngine:
        try:
            return await asyncio.to_thread(start)
        except asyncio.CancelledError:
            # The thread cannot be stopped, and nobody waits for its engine: its children would outlive us.
            end_orphans(engine.state_dir / RECORD_FILE)
            raise

    return create
