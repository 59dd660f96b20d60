"""Adapters for tests: random or zero LoRA tensors in the serving layout, with a true manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from mint_schemas.common import FileRef

from shared.adapters import layout
from shared.adapters.admission import base_modules
from shared.adapters.manifest import Manifest, TensorSpec
from shared.bases import Base


def lora_tensors(
    base: Base, rank: int, seed: int, std: float = 0.02, targets: tuple[str, ...] | None = None
) -> dict[str, layout.Array]:
    """lora_A [rank, in] and lora_B [out, rank] of every target module; `std` 0 makes every B zero."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, layout.Array] = {}
    for module, (out, inner) in sorted(base_modules(base.directory).items()):
        if module.rsplit(".", 1)[-1] in (targets or base.target_modules):
            first, second = rng.standard_normal((rank, inner)), rng.standard_normal((out, rank)) * std
            tensors[layout.serving_name(module, "lora_A")] = (first / inner**0.5).astype(np.float32)
            tensors[layout.serving_name(module, "lora_B")] = second.astype(np.float32)
    return tensors


def write_adapter(
    directory: Path,
    base: Base,
    revision: str,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    use_rslora: bool = False,
    seed: int = 0,
    std: float = 0.02,
    targets: tuple[str, ...] | None = None,
    tensors: dict[str, layout.Array] | None = None,
    config: bytes | None = None,
) -> Manifest:
    """Write both files to `directory`; the manifest is true to them, whatever they hold."""
    directory.mkdir(parents=True, exist_ok=True)
    targets = targets or base.target_modules
    if tensors is None:
        tensors = lora_tensors(base, rank, seed, std, targets)
    config = config or layout.config_bytes(base.name, rank, alpha, use_rslora, targets)
    files = {layout.CONFIG_FILE: config, layout.TENSOR_FILE: layout.tensor_file_bytes(tensors)}
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return manifest_for(directory, base, revision, rank, alpha, use_rslora, targets)


def manifest_for(
    directory: Path,
    base: Base,
    revision: str,
    rank: int,
    alpha: float = 16.0,
    use_rslora: bool = False,
    targets: tuple[str, ...] | None = None,
) -> Manifest:
    """The manifest of whatever files are in `directory`."""
    path = directory / layout.TENSOR_FILE
    headers = layout.read_headers(path)
    digests = {name: _sha256(directory / name) for name in (layout.CONFIG_FILE, layout.TENSOR_FILE)}
    complete = all(n.replace("lora_B", "lora_A") in headers for n in headers)
    return Manifest(
        revision=revision,
        policy=revision.split("@")[0],
        base=base.name,
        base_sha256=base.sha256,
        tokenizer_sha256=base.tokenizer_sha256,
        chat_template_sha256=base.chat_template_sha256,
        rank=rank,
        alpha=alpha,
        use_rslora=use_rslora,
        target_modules=targets or base.target_modules,
        tensors=tuple(TensorSpec(name=h.name, shape=h.shape, dtype=h.dtype) for h in headers.values()),  # type: ignore[arg-type]
        files={
            name: FileRef(key=f"blobs/sha256/{digest}", sha256=digest, size=(directory / name).stat().st_size)
            for name, digest in digests.items()
        },
        adapter_sha256=layout.adapter_sha256(digests),
        parent=None,
        run_id="run",
        step=1,
        zero_delta=complete and layout.is_zero_delta(path, headers),
        probe=None,
    )


def true_files(manifest: Manifest, directory: Path) -> Manifest:
    """The manifest with size and digests of what lies in `directory` now; the rest of it stays."""
    digests = {name: _sha256(directory / name) for name in manifest.files if (directory / name).is_file()}
    files = {
        name: FileRef(key=f"blobs/sha256/{digest}", sha256=digest, size=(directory / name).stat().st_size)
        for name, digest in digests.items()
    }
    whole = {name: ref.sha256 for name, ref in (manifest.files | files).items()}
    return manifest.model_copy(update={"files": manifest.files | files, "adapter_sha256": layout.adapter_sha256(whole)})


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
