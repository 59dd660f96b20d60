"""Settings of one engine, the same for every implementation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class EngineSettings:
    """`slots`: adapters in one running batch; `max_resident`: adapters in memory, at least `slots`.
    `kv_cache_bytes` bounds the KV cache, `max_context` prompt + completion in tokens. `state_dir`
    belongs to this engine alone: it keeps the record of its child processes there.

    Raises ValueError naming the field."""

    state_dir: Path
    dtype: Dtype = "bfloat16"
    slots: int = 4
    max_resident: int = 16
    max_rank: int = 32
    kv_cache_bytes: int = 2**30
    max_context: int = 2048
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("slots", "max_resident", "max_rank", "kv_cache_bytes", "max_context", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_resident < self.slots:
            raise ValueError(f"max_resident is {self.max_resident}; it must be at least slots ({self.slots})")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}; allowed: 'float32', 'bfloat16'")
