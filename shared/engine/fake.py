"""A deterministic small engine without torch: a real LoRA model of one hashed layer.

The base's logits are drawn from a hash of the last tokens; an adapter adds scaling · B·A·h of each of
its modules, h hashed likewise, so that other tensors give other tokens and a zero delta gives the
base's. Everything around the model (queue, proof, working set) is what the Transformers engine runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.adapters import layout
from shared.adapters.admission import Admitted, host_of
from shared.adapters.manifest import Manifest
from shared.bases import Base
from shared.engine.batch import Prefilled, Rows
from shared.engine.drawing import Row
from shared.engine.loop import Applied, LoopEngine
from shared.engine.port import Capabilities
from shared.engine.settings import EngineSettings

CONTEXT_TOKENS = 4


@dataclass(frozen=True)
class _Adapter:
    scaling: float
    pairs: tuple[tuple[Rows, Rows], ...]


@dataclass
class _State:
    contexts: list[list[int]]
    adapters: list[int | None]


class FakeModel:
    kv_bytes_per_token = 8

    def __init__(self, vocab_size: int, modules: int = 4) -> None:
        self.vocab_size = vocab_size
        self._modules = modules
        self._adapters: dict[int, _Adapter] = {}

    def add(self, handle: int, manifest: Manifest, directory: Path, admitted: Admitted) -> Applied:
        path = directory / layout.TENSOR_FILE

        def pair(module: str) -> tuple[Rows, Rows]:
            first, second = (admitted.tensors[layout.serving_name(module, part)] for part in ("lora_A", "lora_B"))
            return layout.read_tensor(path, first), layout.read_tensor(path, second)

        self._adapters[handle] = _Adapter(manifest.scaling, tuple(pair(m) for m in admitted.modules[: self._modules]))
        return Applied(len(admitted.modules), tensors_equal=True)

    def remove(self, handle: int) -> None:
        self._adapters.pop(handle, None)

    def prefill(
        self, prompts: Sequence[tuple[int, ...]], adapters: Sequence[int | None], full: Sequence[bool]
    ) -> Prefilled:
        state = _State([list(prompt) for prompt in prompts], list(adapters))
        every = [
            np.stack([self._logits(prompt[: i + 1], adapter) for i in range(len(prompt))]) if wanted else None
            for prompt, adapter, wanted in zip(prompts, adapters, full, strict=True)
        ]
        last = np.stack([self._logits(prompt, adapter) for prompt, adapter in zip(prompts, adapters, strict=True)])
        return Prefilled(state, last, every)

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        return _State([list(state.contexts[i]) for i in rows], [state.adapters[i] for i in rows])

    def decode(self, state: Any, tokens: Sequence[int]) -> Rows:
        for context, token in zip(state.contexts, tokens, strict=True):
            context.append(token)
        return np.stack([self._logits(c, a) for c, a in zip(state.contexts, state.adapters, strict=True)])

    def _logits(self, context: Sequence[int], handle: int | None) -> Row:
        key = hashlib.sha256(json.dumps(list(context[-CONTEXT_TOKENS:])).encode()).digest()
        rng = np.random.Generator(np.random.PCG64(int.from_bytes(key[:16], "big")))
        logits_V = 2.0 * rng.standard_normal(self.vocab_size, dtype=np.float32)
        if handle is not None:
            adapter = self._adapters[handle]
            for first, second in adapter.pairs:
                hidden = rng.standard_normal(first.shape[1], dtype=np.float32)
                delta = np.float32(adapter.scaling) * (second @ (first @ hidden))
                width = min(len(delta), self.vocab_size)
                logits_V[:width] += delta[:width]
        return logits_V


def fake_engine(base: Base, settings: EngineSettings) -> LoopEngine:
    """The fake on a configured base: its digests, modules and vocabulary, none of its weights."""
    vocab_size = int(json.loads((base.directory / "config.json").read_bytes())["vocab_size"])
    host = host_of(base, settings.max_rank)
    has = Capabilities(
        name="fake",
        base_name=base.name,
        base_sha256=base.sha256,
        dtype=settings.dtype,
        max_context=min(settings.max_context, base.max_context),
        max_rank=host.max_rank,
        slots=settings.max_resident,
        max_resident=settings.max_resident,
        target_modules=host.target_modules,
    )
    return LoopEngine(FakeModel(vocab_size), host, has)
