"""Wiring of the Transformers engine: the resident model, its limits, the loop around it."""

from __future__ import annotations

from shared.adapters.admission import host_of
from shared.bases import Base
from shared.engine.loop import LoopEngine
from shared.engine.port import Capabilities
from shared.engine.settings import EngineSettings

from .model import TransformersModel


def transformers_engine(base: Base, settings: EngineSettings) -> LoopEngine:
    """Loads the base (blocking, seconds). PEFT applies every resident adapter in place, so each
    resident adapter is in a slot."""
    host = host_of(base, settings.max_rank)
    model = TransformersModel(base.directory, settings.dtype, host.target_modules, settings.threads)
    has = Capabilities(
        name="transformers",
        base_name=base.name,
        base_sha256=base.sha256,
        dtype=settings.dtype,
        max_context=min(settings.max_context, base.max_context),
        max_rank=host.max_rank,
        slots=settings.max_resident,
        max_resident=settings.max_resident,
        target_modules=host.target_modules,
    )
    return LoopEngine(model, host, has, max_tokens=settings.kv_cache_bytes // model.kv_bytes_per_token)
