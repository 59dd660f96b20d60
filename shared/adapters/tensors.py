"""Checks of an adapter's tensors against its manifest and host: names, pairs, shapes, values.

Part of admission, which calls them in order; each raises AdapterRefused naming the tensor or module.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from shared.adapters import layout
from shared.adapters.host import Host
from shared.adapters.layout import TensorHeader
from shared.adapters.manifest import Manifest
from shared.engine.port import AdapterRefused

LARGEST = 3.3895313892515355e38
"""The largest number of bfloat16, which is below that of float32."""


def label(manifest: Manifest) -> str:
    return f"adapter {manifest.revision or manifest.policy}"


def check_tensors(manifest: Manifest, tensors: Mapping[str, TensorHeader], host: Host) -> tuple[str, ...]:
    listed = {spec.name: (spec.shape, spec.dtype) for spec in manifest.tensors}
    actual = {name: (header.shape, header.dtype) for name, header in tensors.items()}
    pairs: dict[str, dict[str, TensorHeader]] = {}
    for name, header in sorted(tensors.items()):
        _refuse_foreign(manifest, name)
        split = layout.split_serving_name(name)
        if split is None:
            raise AdapterRefused(
                f"{label(manifest)}: tensor {name!r} is no LoRA tensor; names are "
                f"{layout.SERVING_PREFIX}<module>.lora_A.weight and .lora_B.weight"
            )
        pairs.setdefault(split[0], {})[split[1]] = header
    _check_known(manifest, sorted(pairs), host)
    for module, parts in pairs.items():
        _check_pair(manifest, module, parts, host.modules[module])
    if listed != actual:
        names = sorted(n for n in listed.keys() | actual.keys() if listed.get(n) != actual.get(n))
        raise AdapterRefused(f"{label(manifest)}: the manifest's tensor list differs from the file at {names[:3]}")
    return tuple(sorted(pairs))


def _refuse_foreign(manifest: Manifest, name: str) -> None:
    reasons = {
        "_orig_mod.": "has the prefix of a compiled module; export the uncompiled module's names",
        "trainable_tokens_": "is a trained-token delta, which engines do not serve",
        "modules_to_save": "is a module saved whole, which engines do not serve",
        "lora_magnitude_vector": "is a DoRA magnitude, which engines do not serve",
        "lora_embedding_": "is an embedding LoRA, which engines do not serve",
        "lm_head": "belongs to lm_head, which engines do not adapt",
        "embed_tokens": "belongs to the embeddings, which engines do not adapt",
        ".bias": "is a bias; only plain LoRA weights are served",
    }
    for mark, reason in reasons.items():
        if mark in name:
            raise AdapterRefused(f"{label(manifest)}: tensor {name!r} {reason}")


def _check_known(manifest: Manifest, modules: list[str], host: Host) -> None:
    targets = set(manifest.target_modules)
    unknown = [m for m in modules if m not in host.modules or m.rsplit(".", 1)[-1] not in targets]
    if unknown or not modules:
        example = unknown[0] if unknown else "nothing"
        raise AdapterRefused(
            f"{label(manifest)}: {len(modules) - len(unknown)} of {len(modules)} modules applied; "
            f"{example!r} is no target module of base {host.base}"
        )
    wanted = {m for m in host.modules if m.rsplit(".", 1)[-1] in targets}
    missing = sorted(wanted - set(modules))
    if missing:
        raise AdapterRefused(
            f"{label(manifest)}: {len(modules)} of {len(wanted)} modules applied; {missing[0]!r} has no tensors"
        )


def _check_pair(manifest: Manifest, module: str, parts: dict[str, TensorHeader], shape: tuple[int, int]) -> None:
    out, inner = shape
    for part, expected in (("lora_A", (manifest.rank, inner)), ("lora_B", (out, manifest.rank))):
        header = parts.get(part)
        if header is None:
            raise AdapterRefused(f"{label(manifest)}: module {module!r} has no {part}")
        if header.dtype not in layout.DTYPE_BYTES:
            raise AdapterRefused(
                f"{label(manifest)}: tensor {header.name!r} is {header.dtype}; allowed: {sorted(layout.DTYPE_BYTES)}"
            )
        if header.shape != expected:
            raise AdapterRefused(
                f"{label(manifest)}: tensor {header.name!r} has shape {list(header.shape)}; "
                f"the base needs {list(expected)}"
            )


def check_values(manifest: Manifest, path: Path, tensors: Mapping[str, TensorHeader]) -> None:
    """Finite everywhere, also as engines scale and cast it, and the manifest's `zero_delta` true to the tensors."""
    for header in tensors.values():
        if not layout.all_finite(path, header):
            raise AdapterRefused(f"{label(manifest)}: tensor {header.name!r} holds values that are not finite")
    for name, header in tensors.items():
        scaling = manifest.scaling if name.endswith(".lora_B.weight") else 1.0
        largest = float(np.abs(layout.read_tensor(path, header)).max(initial=0.0)) * scaling
        if not largest <= LARGEST:
            raise AdapterRefused(
                f"{label(manifest)}: tensor {name!r} reaches {largest:.3g} as engines scale it; at most {LARGEST:.3g} "
                "stays finite"
            )
    zero = layout.is_zero_delta(path, tensors)
    if zero != manifest.zero_delta:
        raise AdapterRefused(
            f"{label(manifest)}: zero_delta is {zero} by its tensors, {manifest.zero_delta} in the manifest"
        )
