"""An adapter made elsewhere becomes one of ours: the two files of a revision and a training checkpoint.

In: a PEFT directory (`read_foreign`) or tensors that were computed (`adopt`). Out: files in our one spelling, fp32,
and their manifest. Half-precision values are widened, which is exact. Invariant: what an engine could not load never
gets in, and both layouts hold the same values, so that what is trained on is what is served.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mint_schemas.common import FileRef
from mint_schemas.training import Lora
from pydantic import ValidationError

from shared.adapters import layout
from shared.adapters.admission import admit, check_config
from shared.adapters.host import Host
from shared.adapters.layout import CONFIG_FILE, TENSOR_FILE, Array, TensorHeader
from shared.adapters.manifest import Manifest, TensorSpec
from shared.adapters.peft_dir import training_layout
from shared.engine.port import AdapterRefused
from shared.rl.checkpoint import ADAPTER_FILE, STATE_FILE, TrainingState
from shared.store import keys

__all__ = ["Adopted", "Foreign", "adopt", "read_foreign"]

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"


@dataclass(frozen=True)
class Foreign:
    """`tensors` by serving name, fp32. `base`: the base model that its config names, whoever called it so."""

    lora: Lora
    tensors: dict[str, Array]
    base: str


@dataclass(frozen=True)
class Adopted:
    """`files` by name: those of the revision, which `manifest` names, and those of the training checkpoint.
    The manifest's revision, policy, run and step are not known yet."""

    files: dict[str, bytes]
    manifest: Manifest


def read_foreign(directory: Path, host: Host) -> Foreign:
    """The adapter in `directory`, proved to fit `host`. Its config is checked as it came, and then written as ours.

    Raises AdapterRefused naming the field, module or tensor, and what is allowed."""
    config = _config(directory / CONFIG_FILE)
    headers = _headers(directory / TENSOR_FILE)
    config["target_modules"] = _targets(config, headers)
    _rewrite(directory / CONFIG_FILE, config, host)
    manifest = _described(directory, config, headers, host)
    check_config(manifest, config)
    admit(manifest, directory, host)
    lora = Lora(
        rank=manifest.rank,
        alpha=manifest.alpha,
        use_rslora=manifest.use_rslora,
        target_modules=manifest.target_modules,
    )
    tensors = {name: layout.read_tensor(directory / TENSOR_FILE, header) for name, header in headers.items()}
    return Foreign(lora, tensors, str(config.get("base_model_name_or_path") or ""))


def adopt(tensors: Mapping[str, Array], lora: Lora, host: Host) -> Adopted:
    """Every file that a path to this adapter needs, and the manifest of its revision."""
    files = {
        TENSOR_FILE: layout.tensor_file_bytes(dict(tensors)),
        CONFIG_FILE: layout.config_bytes(host.base, lora.rank, lora.alpha, lora.use_rslora, lora.target_modules),
        ADAPTER_FILE: training_layout(tensors),
        STATE_FILE: layout.canonical_json(_state(lora, host).model_dump(mode="json")),
    }
    refs = {name: _ref(files[name]) for name in (CONFIG_FILE, TENSOR_FILE)}
    headers = [TensorHeader(name, "F32", tensors[name].shape, 0, 0) for name in sorted(tensors)]
    shape = {"rank": lora.rank, "alpha": lora.alpha, "use_rslora": lora.use_rslora}
    return Adopted(files, _manifest(host, shape, lora.target_modules, headers, refs, _changes_nothing(tensors)))


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(f"{CONFIG_FILE} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterRefused(f"{CONFIG_FILE} is no JSON object")
    rank, alpha, rslora = config.get("r"), config.get("lora_alpha"), config.get("use_rslora", False)
    if type(rank) is not int:
        raise AdapterRefused(f"{CONFIG_FILE}: r is {rank!r}; it must be a whole number")
    if type(alpha) not in (int, float):
        raise AdapterRefused(f"{CONFIG_FILE}: lora_alpha is {alpha!r}; it must be a number")
    if not isinstance(rslora, bool):
        raise AdapterRefused(f"{CONFIG_FILE}: use_rslora is {rslora!r}; it must be true or false")
    return config


def _rewrite(path: Path, config: dict[str, Any], host: Host) -> None:
    rank, alpha, rslora = config["r"], config["lora_alpha"], config.get("use_rslora", False)
    try:
        layout.canonical_json(config)
        path.write_bytes(layout.config_bytes(host.base, rank, alpha, rslora, config["target_modules"]))
    except (ValueError, OverflowError) as error:
        raise AdapterRefused(f"{CONFIG_FILE} holds what JSON has no word for: {error}") from error


def _headers(path: Path) -> dict[str, TensorHeader]:
    with path.open("rb") as file:
        start = file.read(9)
    # The length of a safetensors header may begin with the same bytes; its header then follows.
    if start.startswith((_ZIP, _PICKLE)) and not start.endswith(b"{"):
        raise AdapterRefused(
            f"{TENSOR_FILE} is a pickle, which can run code when it is read; save it with safe_serialization=True"
        )
    try:
        headers = layout.read_headers(path)
    except layout.BadTensorFile as error:
        raise AdapterRefused(str(error)) from error
    for header in headers.values():
        if header.dtype not in layout.DTYPE_BYTES:
            allowed = ", ".join(sorted(layout.DTYPE_BYTES))
            raise AdapterRefused(f"tensor {header.name!r} is {header.dtype}; allowed: {allowed}")
    return headers


def _targets(config: dict[str, Any], headers: Mapping[str, TensorHeader]) -> list[str]:
    """The last parts of module paths. What a pattern means only the file can say, and admission asks for all of it."""
    named = config.get("target_modules")
    if isinstance(named, list) and all(isinstance(name, str) for name in named):
        return sorted({name.rsplit(".", 1)[-1] for name in named})
    if not isinstance(named, str):
        raise AdapterRefused(f"{CONFIG_FILE}: target_modules is {named!r}; it must be a list of module names")
    found = [split[0] for split in map(layout.split_serving_name, headers) if split is not None]
    return sorted({module.rsplit(".", 1)[-1] for module in found})


def _described(directory: Path, config: dict[str, Any], headers: Mapping[str, TensorHeader], host: Host) -> Manifest:
    refs = {name: _stored_ref(directory / name) for name in (CONFIG_FILE, TENSOR_FILE)}
    shape = {"rank": config["r"], "alpha": config["lora_alpha"], "use_rslora": config.get("use_rslora", False)}
    try:
        return _manifest(
            host,
            shape,
            config["target_modules"],
            headers.values(),
            refs,
            all(_fits(header, host) for header in headers.values()) and _zero_delta(directory / TENSOR_FILE, headers),
        ).model_copy(update={"policy": "to import"})
    except (ValidationError, OverflowError) as error:
        raise AdapterRefused(f"{CONFIG_FILE} cannot be read: {error}") from error


def _fits(header: TensorHeader, host: Host) -> bool:
    """Whether it belongs to a module of the base, so that no product has more numbers than the module."""
    module, part = layout.split_serving_name(header.name) or ("", "")
    out, inner = host.modules.get(module, (0, 0))
    rank = header.shape[0 if part == "lora_A" else -1] if len(header.shape) == 2 else 0
    return 0 < rank <= host.max_rank and header.shape == ((rank, inner) if part == "lora_A" else (out, rank))


def _zero_delta(path: Path, headers: Mapping[str, TensorHeader]) -> bool:
    """False also where there is no telling: admission then says what is wrong."""
    try:
        with np.errstate(all="ignore"):
            return layout.is_zero_delta(path, headers)
    except (KeyError, ValueError):
        return False


def _changes_nothing(tensors: Mapping[str, Array]) -> bool:
    pairs = (
        (t, tensors[n.replace(".lora_B.", ".lora_A.")]) for n, t in tensors.items() if n.endswith(".lora_B.weight")
    )
    return not any(second.any() and (second @ first).any() for second, first in pairs)


def _state(lora: Lora, host: Host) -> TrainingState:
    """Of no policy and no run: equal adapters have equal files, whoever imports them."""
    return TrainingState(
        policy="",
        run_id="",
        base=host.base,
        base_sha256=host.base_sha256,
        rank=lora.rank,
        alpha=lora.alpha,
        use_rslora=lora.use_rslora,
        target_modules=tuple(sorted(lora.target_modules)),
        seed=0,
        step=0,
        optimizer_step=0,
    )


def _manifest(
    host: Host,
    shape: Mapping[str, Any],
    targets: Iterable[str],
    headers: Iterable[TensorHeader],
    refs: Mapping[str, FileRef],
    zero_delta: bool,
) -> Manifest:
    specs = [{"name": h.name, "shape": h.shape, "dtype": h.dtype} for h in headers]
    return Manifest(
        revision="",
        policy="",
        base=host.base,
        base_sha256=host.base_sha256,
        tokenizer_sha256=host.tokenizer_sha256,
        chat_template_sha256=host.chat_template_sha256,
        **shape,
        target_modules=tuple(sorted(targets)),
        tensors=tuple(TensorSpec.model_validate(spec) for spec in specs),
        files=dict(refs),
        adapter_sha256=layout.adapter_sha256({name: ref.sha256 for name, ref in refs.items()}),
        parent=None,
        run_id="",
        step=0,
        zero_delta=zero_delta,
        probe=None,
    )


def _ref(data: bytes) -> FileRef:
    sha256 = hashlib.sha256(data).hexdigest()
    return FileRef(key=keys.blob(sha256), sha256=sha256, size=len(data))


def _stored_ref(path: Path) -> FileRef:
    sha256 = layout.file_sha256(path)
    return FileRef(key=keys.blob(sha256), sha256=sha256, size=path.stat().st_size)
