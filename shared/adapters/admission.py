"""Admission: whatever an engine could not serve is refused before an engine sees it.

The exporter runs it before an export is accepted, and every engine runs it before a load. In: the
manifest, the directory with the two files, and what the base and the engine are (`Host`). Out: an
`Admitted`, or AdapterRefused naming the tensor, module or field and what is allowed.

Invariant: admitted files are whole, are the manifest's by digest, are finite (as scaled, too), and each of their
tensors belongs to a module of the base that the host serves, in its shape. The config is, byte for byte, the one
that the manifest stands for, so that no reader can make anything else of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.adapters import layout
from shared.adapters.host import Host, base_modules, host_of
from shared.adapters.layout import CONFIG_FILE, TENSOR_FILE, TensorHeader
from shared.adapters.manifest import Manifest
from shared.adapters.tensors import check_tensors, check_values, label
from shared.engine.port import AdapterRefused

__all__ = ["Admitted", "Host", "admit", "base_modules", "host_of"]

_FILES = frozenset({CONFIG_FILE, TENSOR_FILE})
MAX_CONFIG_BYTES = 2**20
# Config fields under which PEFT would compute something else than a plain LoRA of one rank.
_PLAIN: dict[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layers_to_transform": (None, []),
    "layers_pattern": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "exclude_modules": (None, []),
    "fan_in_fan_out": (False, None),
    "use_qalora": (False, None),
    "megatron_config": (None,),
    "eva_config": (None,),
    "corda_config": (None,),
    "layer_replication": (None, []),
    # Other initialisations (PiSSA, OLoRA, LoftQ …) change the base's weights too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
}


@dataclass(frozen=True)
class Admitted:
    """Proved files: headers by tensor name, and the modules that carry LoRA, sorted."""

    adapter_sha256: str
    tensors: Mapping[str, TensorHeader]
    modules: tuple[str, ...]
    bytes: int


def admit(manifest: Manifest, directory: Path, host: Host) -> Admitted:
    """Prove that the files in `directory` are the manifest's and fit `host`. Raises AdapterRefused."""
    _check_provenance(manifest, host)
    _check_files(manifest, directory)
    try:
        tensors = layout.read_headers(directory / TENSOR_FILE)
    except layout.BadTensorFile as error:
        raise AdapterRefused(f"{label(manifest)}: {error}") from error
    _check_digests(manifest, directory)
    check_config(manifest, _read_config(manifest, directory))
    _check_spelling(manifest, directory)
    modules = check_tensors(manifest, tensors, host)
    check_values(manifest, directory / TENSOR_FILE, tensors)
    size = sum((directory / name).stat().st_size for name in (CONFIG_FILE, TENSOR_FILE))
    return Admitted(manifest.adapter_sha256, tensors, modules, size)


def _check_provenance(manifest: Manifest, host: Host) -> None:
    for what, theirs, ours in (
        ("base", manifest.base, host.base),
        ("base_sha256", manifest.base_sha256, host.base_sha256),
        ("tokenizer_sha256", manifest.tokenizer_sha256, host.tokenizer_sha256),
        ("chat_template_sha256", manifest.chat_template_sha256, host.chat_template_sha256),
    ):
        if theirs != ours:
            raise AdapterRefused(
                f"{label(manifest)}: {what} is {theirs!r}, the engine's is {ours!r}; "
                "serve it on the base that it was trained on"
            )
    if not 1 <= manifest.rank <= host.max_rank:
        raise AdapterRefused(f"{label(manifest)}: rank {manifest.rank} is outside 1 to {host.max_rank}")
    outside = sorted(set(manifest.target_modules) - host.target_modules)
    if outside:
        raise AdapterRefused(
            f"{label(manifest)}: target modules {outside} are not served; allowed: {sorted(host.target_modules)}"
        )


def _check_files(manifest: Manifest, directory: Path) -> None:
    """Names and sizes only: cheap, and the first thing that a cut download breaks."""
    named = {f"the manifest names {name!r}" for name in manifest.files.keys() - _FILES}
    # Only the two files are in the digest; whatever else lies there an engine could read unproved.
    found = {f"{directory} holds {path.name!r}" for path in directory.glob("*") if path.name not in _FILES}
    for more in sorted(named | found):
        raise AdapterRefused(f"{label(manifest)}: {more} beside {CONFIG_FILE} and {TENSOR_FILE}; it is not served")
    for name in (CONFIG_FILE, TENSOR_FILE):
        if name not in manifest.files:
            raise AdapterRefused(f"{label(manifest)}: the manifest names no {name}")
        path = directory / name
        if not path.is_file():
            raise AdapterRefused(f"{label(manifest)}: {name} is missing in {directory}")
        size, expected = path.stat().st_size, manifest.files[name].size
        if size == 0:
            raise AdapterRefused(f"{label(manifest)}: {name} is empty (0 bytes)")
        if size != expected:
            state = "truncated" if size < expected else "too long"
            raise AdapterRefused(f"{label(manifest)}: {name} is {state}: {size} of {expected} bytes")


def _check_digests(manifest: Manifest, directory: Path) -> None:
    found = {name: layout.file_sha256(directory / name) for name in (CONFIG_FILE, TENSOR_FILE)}
    for name, digest in found.items():
        if digest != manifest.files[name].sha256:
            raise AdapterRefused(
                f"{label(manifest)}: {name} has sha256 {digest}, the manifest says {manifest.files[name].sha256}"
            )
    combined = layout.adapter_sha256(found)
    if combined != manifest.adapter_sha256:
        raise AdapterRefused(
            f"{label(manifest)}: adapter_sha256 is {combined}, the manifest says {manifest.adapter_sha256}"
        )


def _read_config(manifest: Manifest, directory: Path) -> dict[str, Any]:
    size = (directory / CONFIG_FILE).stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise AdapterRefused(f"{label(manifest)}: {CONFIG_FILE} has {size} bytes; at most {MAX_CONFIG_BYTES} are read")
    try:
        config = json.loads((directory / CONFIG_FILE).read_bytes())
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(f"{label(manifest)}: {CONFIG_FILE} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterRefused(f"{label(manifest)}: {CONFIG_FILE} is no JSON object")
    return config


def _check_spelling(manifest: Manifest, directory: Path) -> None:
    """Equal values may be written so that a reader fails on them (a rank of 8.0), and keys may be there that an
    engine reads and nobody checked."""
    canonical = layout.config_bytes(
        manifest.base, manifest.rank, manifest.alpha, manifest.use_rslora, manifest.target_modules
    )
    if (directory / CONFIG_FILE).read_bytes() != canonical:
        raise AdapterRefused(
            f"{label(manifest)}: {CONFIG_FILE} is not, byte for byte, what a plain LoRA of its manifest has; "
            "export it again"
        )


def check_config(manifest: Manifest, config: Mapping[str, Any]) -> None:
    """Raises AdapterRefused for a config, in whatever spelling, that is not that of the manifest's plain LoRA."""
    if config.get("peft_type") != "LORA":
        raise AdapterRefused(f"{label(manifest)}: peft_type {config.get('peft_type')!r}; only 'LORA' is served")
    for key, allowed in _PLAIN.items():
        if config.get(key) not in allowed:
            raise AdapterRefused(f"{label(manifest)}: {key}={config[key]!r} is not served; export it as a plain LoRA")
    targets = config.get("target_modules")
    named = targets if isinstance(targets, list) and all(isinstance(target, str) for target in targets) else []
    if sorted(named) != sorted(manifest.target_modules):
        raise AdapterRefused(
            f"{label(manifest)}: target_modules in {CONFIG_FILE} are {targets!r}, "
            f"the manifest's are {sorted(manifest.target_modules)}"
        )
    for key, ours in (("r", manifest.rank), ("lora_alpha", manifest.alpha)):
        if config.get(key) != ours:
            raise AdapterRefused(
                f"{label(manifest)}: {key}={config.get(key)!r} in {CONFIG_FILE}, {ours!r} in the manifest"
            )
    if bool(config.get("use_rslora")) != manifest.use_rslora:
        raise AdapterRefused(f"{label(manifest)}: use_rslora differs between {CONFIG_FILE} and the manifest")
    if not np.isfinite(manifest.alpha) or manifest.alpha <= 0:
        raise AdapterRefused(f"{label(manifest)}: alpha {manifest.alpha} is not a positive number")
