"""Admission: what no engine could serve is refused, with the tensor, module or field named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.adapters import layout
from shared.adapters.admission import Host, admit, host_of
from shared.adapters.manifest import Manifest
from shared.bases import Base
from shared.engine.port import AdapterRefused
from tests.adapters import lora_tensors, write_adapter
from tests.broken_adapters import BROKEN, stored_as, write_broken

REVISION = "acme/p@1"
Q = "model.layers.0.self_attn.q_proj"
Q_A, Q_B = layout.serving_name(Q, "lora_A"), layout.serving_name(Q, "lora_B")


@pytest.fixture
def base(tmp_path: Path) -> Base:
    """Two layers of two projections, as headers with little data."""
    directory = tmp_path / "base"
    directory.mkdir()
    weights = {}
    for layer in (0, 1):
        weights[f"model.layers.{layer}.self_attn.q_proj.weight"] = np.zeros((6, 4), np.float32)
        weights[f"model.layers.{layer}.mlp.down_proj.weight"] = np.zeros((4, 10), np.float32)
    weights["model.embed_tokens.weight"] = np.zeros((20, 4), np.float32)
    weights["lm_head.weight"] = np.zeros((20, 4), np.float32)
    weights["model.norm.weight"] = np.zeros((4,), np.float32)
    (directory / "model.safetensors").write_bytes(layout.tensor_file_bytes(weights))
    return Base(
        name="some/base",
        token="some-base",
        directory=directory,
        max_rank=16,
        target_modules=("q_proj", "down_proj"),
        sha256="1" * 64,
        tokenizer_sha256="2" * 64,
        chat_template_sha256="3" * 64,
        max_context=64,
        bytes=1,
    )


@pytest.fixture
def host(base: Base) -> Host:
    return host_of(base)


def test_a_good_adapter_is_admitted(tmp_path: Path, base: Base, host: Host) -> None:
    manifest = write_adapter(tmp_path / "a", base, REVISION)
    admitted = admit(manifest, tmp_path / "a", host)
    assert admitted.adapter_sha256 == manifest.adapter_sha256
    assert len(admitted.modules) == 4
    assert admitted.bytes == manifest.adapter_bytes


def test_some_of_the_targets_are_enough(tmp_path: Path, base: Base, host: Host) -> None:
    manifest = write_adapter(tmp_path / "a", base, REVISION, targets=("q_proj",))
    assert admit(manifest, tmp_path / "a", host).modules == (Q, Q.replace("0", "1"))


def test_a_zero_delta_is_admitted_and_must_say_so(tmp_path: Path, base: Base, host: Host) -> None:
    manifest = write_adapter(tmp_path / "a", base, REVISION, std=0.0)
    assert manifest.zero_delta
    admit(manifest, tmp_path / "a", host)
    with pytest.raises(AdapterRefused, match="zero_delta is True by its tensors"):
        admit(manifest.model_copy(update={"zero_delta": False}), tmp_path / "a", host)


def test_the_engine_may_take_less_rank_than_the_base(tmp_path: Path, base: Base) -> None:
    manifest = write_adapter(tmp_path / "a", base, REVISION, rank=16)
    with pytest.raises(AdapterRefused, match="rank 16 is outside 1 to 8"):
        admit(manifest, tmp_path / "a", host_of(base, max_rank=8))


@pytest.mark.parametrize("name", [layout.CONFIG_FILE, layout.TENSOR_FILE])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "is truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "is too long"),
    ],
)
def test_broken_files(
    tmp_path: Path, base: Base, host: Host, name: str, damage: Callable[[Path], Any], message: str
) -> None:
    """aibrix#2029: a partial download counted complete."""
    manifest = write_adapter(tmp_path / "a", base, REVISION)
    damage(tmp_path / "a" / name)
    with pytest.raises(AdapterRefused, match=f"{REVISION}: {name} {message}"):
        admit(manifest, tmp_path / "a", host)


@pytest.mark.parametrize("name", BROKEN)
def test_what_an_engine_must_never_see(tmp_path: Path, base: Base, host: Host, name: str) -> None:
    """vllm#3310, vllm#11702: with a true manifest, the file, tensor or module is named."""
    damage, message = BROKEN[name]
    manifest = write_broken(tmp_path / "a", base, damage)
    with pytest.raises(AdapterRefused, match=f"adapter acme/broken@1: .*{message}"):
        admit(manifest, tmp_path / "a", host)


def test_a_header_is_never_read_at_its_own_word(
    tmp_path: Path, base: Base, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header that claims more than is allowed is refused after eight bytes, whatever the file holds."""
    manifest = write_broken(tmp_path / "a", base, BROKEN["a header of 2^60 bytes"][0])
    asked: list[int] = []
    real = Path.open

    def watched(path: Path, *args: Any, **kwargs: Any) -> Any:
        file = real(path, *args, **kwargs)
        read = file.read

        class Watched:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def read(self, size: int = -1) -> Any:
                asked.append(size)
                return read(size)

        return Watched()

    monkeypatch.setattr(Path, "open", watched)
    with pytest.raises(AdapterRefused, match="claims a header"):
        admit(manifest, tmp_path / "a", host)
    assert asked == [8]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_each_dtype_that_is_served_is_admitted(tmp_path: Path, base: Base, host: Host, dtype: str) -> None:
    manifest = write_broken(tmp_path / "a", base, stored_as(dtype))
    assert len(admit(manifest, tmp_path / "a", host).modules) == 4


def test_other_bytes_of_the_same_length(tmp_path: Path, base: Base, host: Host) -> None:
    """s3transfer#371: sizes and ETags are no proof; only the sha256 is."""
    manifest = write_adapter(tmp_path / "a", base, REVISION)
    path = tmp_path / "a" / layout.TENSOR_FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(AdapterRefused, match="has sha256"):
        admit(manifest, tmp_path / "a", host)


def test_a_manifest_with_another_combined_digest(tmp_path: Path, base: Base, host: Host) -> None:
    manifest = write_adapter(tmp_path / "a", base, REVISION).model_copy(update={"adapter_sha256": "f" * 64})
    with pytest.raises(AdapterRefused, match="adapter_sha256 is"):
        admit(manifest, tmp_path / "a", host)


@pytest.mark.parametrize("field", ["base", "base_sha256", "tokenizer_sha256", "chat_template_sha256"])
def test_another_base_tokenizer_or_template(tmp_path: Path, base: Base, host: Host, field: str) -> None:
    """lorax#311, lorax#71"""
    manifest = write_adapter(tmp_path / "a", base, REVISION).model_copy(update={field: "e" * 64})
    with pytest.raises(AdapterRefused, match=f"{field} is '{'e' * 64}'"):
        admit(manifest, tmp_path / "a", host)


def _refused(tmp_path: Path, base: Base, host: Host, message: str, **adapter: Any) -> None:
    manifest = write_adapter(tmp_path / "a", base, REVISION, **adapter)
    with pytest.raises(AdapterRefused, match=message):
        admit(manifest, tmp_path / "a", host)


def test_target_modules_outside(tmp_path: Path, base: Base, host: Host) -> None:
    manifest = write_adapter(tmp_path / "a", base, REVISION)
    narrow = replace(host, target_modules=frozenset({"q_proj"}))
    with pytest.raises(AdapterRefused, match=r"target modules \['down_proj'\] are not served"):
        admit(manifest, tmp_path / "a", narrow)


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        # vllm#34186
        (lambda n: n.replace("model.layers", "model.language_model.layers"), "0 of 4 modules applied"),
        # Soup#335
        (lambda n: n.replace("base_model.model.", "base_model.model._orig_mod."), "compiled module"),
        # vllm#9280
        (lambda n: n.replace(Q_A, "base_model.model.lm_head.weight"), "lm_head.weight' belongs to lm_head"),
        (lambda n: n.replace(Q_A, "base_model.model.modules_to_save.x.weight"), "saved whole"),
        # vllm#36501
        (
            lambda n: n.replace(Q_A, "base_model.model.model.embed_tokens.trainable_tokens_delta"),
            "embed_tokens.trainable_tokens_delta' is a trained-token delta",
        ),
        (lambda n: n.replace(Q_A, f"base_model.model.{Q}.lora_magnitude_vector.weight"), "DoRA"),
        (lambda n: n.replace(Q_A, f"base_model.model.{Q}.lora_B.bias"), "is a bias"),
        (lambda n: n.replace("base_model.model.", ""), "is no LoRA tensor"),
        (lambda n: n.replace("layers.1.", "layers.7."), "2 of 4 modules applied"),
    ],
)
def test_foreign_tensors(tmp_path: Path, base: Base, host: Host, rename: Callable[[str], str], message: str) -> None:
    tensors = {rename(name): value for name, value in lora_tensors(base, 8, seed=0).items()}
    _refused(tmp_path, base, host, message, tensors=tensors)


def test_a_missing_half_and_a_missing_module(tmp_path: Path, base: Base, host: Host) -> None:
    tensors = lora_tensors(base, 8, seed=0)
    half = {name: value for name, value in tensors.items() if name != Q_B}
    _refused(tmp_path, base, host, f"module '{Q}' has no lora_B", tensors=half)
    fewer = {name: value for name, value in tensors.items() if name not in (Q_A, Q_B)}
    _refused(tmp_path, base, host, "3 of 4 modules applied", tensors=fewer)


@pytest.mark.parametrize(("name", "shape"), [(Q_A, (8, 5)), (Q_A, (4, 4)), (Q_B, (8, 6)), (Q_B, (6, 8, 1))])
def test_wrong_shapes(tmp_path: Path, base: Base, host: Host, name: str, shape: tuple[int, ...]) -> None:
    tensors = lora_tensors(base, 8, seed=0) | {name: np.ones(shape, np.float32)}
    _refused(tmp_path, base, host, "has shape", tensors=tensors)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(tmp_path: Path, base: Base, host: Host, value: float) -> None:
    tensors = lora_tensors(base, 8, seed=0)
    tensors[Q_B][3, 2] = value
    with np.errstate(invalid="ignore"):
        _refused(tmp_path, base, host, "not finite", tensors=tensors)


@pytest.mark.parametrize(("name", "value"), [(Q_B, 3e38), (Q_B, -1.7e38), (Q_A, 3.4e38)])
def test_values_that_do_not_stay_finite_in_an_engine(
    tmp_path: Path, base: Base, host: Host, name: str, value: float
) -> None:
    """With alpha 16 and rank 8, B is scaled by 2; bfloat16 ends before float32 does."""
    tensors = lora_tensors(base, 8, seed=0)
    tensors[name][0, 0] = value
    with np.errstate(over="ignore"):
        _refused(tmp_path, base, host, "stays finite", tensors=tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"r": 4}, "r=4 in adapter_config.json, 8 in the manifest"),
        ({"lora_alpha": 4}, "lora_alpha=4"),
        ({"use_rslora": True}, "use_rslora differs"),
        ({"target_modules": ["q_proj"]}, "target_modules in adapter_config.json"),
        ({"target_modules": "all-linear"}, "target_modules in adapter_config.json"),
        ({"target_modules": [1, "q_proj"]}, "target_modules in adapter_config.json"),
        ({"r": 8.0}, "byte for byte"),
        ({"lora_alpha": 16.0}, "byte for byte"),
        ({"lora_dropout": 0.5}, "byte for byte"),
        ({"a_key_of_tomorrow": 1}, "byte for byte"),
    ],
)
def test_configs_that_compute_something_else(
    tmp_path: Path, base: Base, host: Host, change: dict[str, Any], message: str
) -> None:
    config = json.loads(layout.config_bytes(base.name, 8, 16.0, False, base.target_modules)) | change
    _refused(tmp_path, base, host, message, config=layout.canonical_json(config))


def test_a_config_that_is_no_json(tmp_path: Path, base: Base, host: Host) -> None:
    _refused(tmp_path, base, host, "is no JSON", config=b"{")
    _refused(tmp_path, base, host, "is no JSON object", config=b"[1]")
    _refused(tmp_path, base, host, "is no JSON", config=b"[" * 100_000)
    _refused(tmp_path, base, host, "at most 1048576 are read", config=b" " * (2**20 + 1))


def test_a_manifest_that_lists_other_tensors(tmp_path: Path, base: Base, host: Host) -> None:
    manifest: Manifest = write_adapter(tmp_path / "a", base, REVISION)
    fewer = manifest.model_copy(update={"tensors": manifest.tensors[1:]})
    with pytest.raises(AdapterRefused, match="tensor list differs"):
        admit(fewer, tmp_path / "a", host)


def test_scaling_with_and_without_rank_stabilisation(tmp_path: Path, base: Base) -> None:
    """vllm#6909: alpha 32, rank 16 → 8.0 with rsLoRA, 2.0 without."""
    rs = write_adapter(tmp_path / "a", base, REVISION, rank=16, alpha=32.0, use_rslora=True)
    plain = write_adapter(tmp_path / "b", base, REVISION, rank=16, alpha=32.0)
    assert (rs.scaling, plain.scaling) == (8.0, 2.0)
