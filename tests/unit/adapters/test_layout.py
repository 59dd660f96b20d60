"""The serving layout: one adapter, one spelling, one hash."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from shared.adapters import layout


def test_names_go_there_and_back() -> None:
    name = layout.serving_name("model.layers.0.self_attn.q_proj", "lora_A")
    assert name == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert layout.split_serving_name(name) == ("model.layers.0.self_attn.q_proj", "lora_A")
    assert layout.split_serving_name("base_model.model.lm_head.weight") is None
    assert layout.split_serving_name("model.layers.0.q_proj.lora_A.weight") is None


def test_a_config_has_one_spelling() -> None:
    one = layout.config_bytes("b", 8, 16.0, False, ["v_proj", "q_proj"])
    assert one == layout.config_bytes("b", 8, 16, False, ("q_proj", "v_proj"))
    config = json.loads(one)
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (8, 16, ["q_proj", "v_proj"])
    assert json.loads(layout.config_bytes("b", 8, 0.5, True, ["q_proj"]))["lora_alpha"] == 0.5


def test_the_adapter_hash_is_that_of_the_list_of_files() -> None:
    files = {"adapter_model.safetensors": "b" * 64, "adapter_config.json": "a" * 64}
    text = f'[["adapter_config.json","{"a" * 64}"],["adapter_model.safetensors","{"b" * 64}"]]'
    assert layout.adapter_sha256(files) == hashlib.sha256(text.encode()).hexdigest()


def test_tensor_files_are_read_back_and_by_safetensors_too(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones((4,), np.float32)}
    path = tmp_path / "t.safetensors"
    path.write_bytes(layout.tensor_file_bytes(tensors))
    assert path.read_bytes() == layout.tensor_file_bytes(dict(reversed(tensors.items())))
    theirs, headers = load_file(path), layout.read_headers(path)
    assert list(headers) == ["a", "b"]
    for name, value in tensors.items():
        assert np.array_equal(theirs[name], value)
        assert np.array_equal(layout.read_tensor(path, headers[name]), value)


def test_bfloat16_is_read_exactly(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    value = torch.randn(5, 7).to(torch.bfloat16)
    save_file({"x": value, "y": value.to(torch.float16)}, tmp_path / "t.safetensors")
    headers = layout.read_headers(tmp_path / "t.safetensors")
    assert np.array_equal(layout.read_tensor(tmp_path / "t.safetensors", headers["x"]), value.float().numpy())
    expected = value.to(torch.float16).float().numpy()
    assert np.array_equal(layout.read_tensor(tmp_path / "t.safetensors", headers["y"]), expected)


def _file(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


GOOD = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"abc", "too short"),
        (struct.pack("<Q", 2**60) + b"{}", "at most"),
        (struct.pack("<Q", 500) + b"{}", "truncated"),
        (_file(b"not json at all"), "not a safetensors header"),
        (_file(b"[]"), "not a safetensors header"),
        (_file(b'{"x": {"dtype": "F32"}}'), "not a safetensors header"),
        (_file(b"[" * 100_000), "not a safetensors header"),
        (_file(json.dumps(GOOD).encode(), b"1234"), "truncated"),
        (_file(json.dumps(GOOD).encode(), b"123456789"), "longer"),
        (_file(json.dumps({"x": GOOD["x"] | {"data_offsets": [4, 12]}}).encode(), b"1" * 12), "does not follow"),
        (_file(json.dumps({"x": GOOD["x"] | {"shape": [3]}}).encode(), b"1" * 8), "not its shape's"),
        (_file(json.dumps({"x": GOOD["x"] | {"shape": [-2]}}).encode(), b"1" * 8), "does not follow"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(data)
    with pytest.raises(layout.BadTensorFile, match=message):
        layout.read_headers(path)
