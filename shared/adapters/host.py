"""What an adapter must fit: the digests, limits and linear modules of one base model on one engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.adapters import layout
from shared.bases import Base


@dataclass(frozen=True)
class Host:
    """What an adapter must fit. `modules`: module path → (out, in) of each linear module of the base;
    `target_modules`: the last parts of module paths that may carry LoRA."""

    base: str
    base_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    max_rank: int
    target_modules: frozenset[str]
    modules: Mapping[str, tuple[int, int]]


def host_of(base: Base, max_rank: int | None = None) -> Host:
    """The host that a configured base makes, up to `max_rank` (default: the base's own)."""
    return Host(
        base=base.name,
        base_sha256=base.sha256,
        tokenizer_sha256=base.tokenizer_sha256,
        chat_template_sha256=base.chat_template_sha256,
        max_rank=base.max_rank if max_rank is None else min(max_rank, base.max_rank),
        target_modules=frozenset(base.target_modules),
        modules=base_modules(base.directory),
    )


def base_modules(directory: Path) -> dict[str, tuple[int, int]]:
    """Module path → (out, in) of every 2-D weight of a base, read from its safetensors headers."""
    found: dict[str, tuple[int, int]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        for name, header in layout.read_headers(path).items():
            if name.endswith(".weight") and len(header.shape) == 2:
                found[name.removesuffix(".weight")] = (header.shape[0], header.shape[1])
    return found
