"""Adapters made elsewhere, and both layouts of one adapter: exact to the byte, both ways."""

from __future__ import annotations

import json
import tarfile
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mint_schemas.commands import CheckpointRef, ExportRequested
from mint_schemas.training import Lora

from services.exporter.convert import convert
from shared.adapters import layout
from shared.adapters.admission import admit
from shared.adapters.host import Host
from shared.adapters.importing import adopt, read_foreign
from shared.adapters.interpolate import Source, combine
from shared.adapters.layout import CONFIG_FILE, TENSOR_FILE
from shared.adapters.peft_dir import COMPLETE_FILE, pack, serving_layout, training_layout
from shared.engine.port import AdapterRefused
from shared.errors import Fatal
from shared.rl.checkpoint import ADAPTER_FILE, STATE_FILE, read_state

MODULES = {f"model.layers.{i}.self_attn.{name}": (8, 16) for i in (0, 1) for name in ("q_proj", "v_proj")}
HOST = Host("tiny/llama", "a" * 64, "b" * 64, "c" * 64, 32, frozenset({"q_proj", "v_proj"}), MODULES)
LORA = Lora(rank=4, alpha=8.0, target_modules=("v_proj", "q_proj"))


def tensors(seed: int = 0, rank: int = 4) -> dict[str, layout.Array]:
    rng = np.random.default_rng(seed)
    found = {}
    for module, (out, inner) in MODULES.items():
        found[layout.serving_name(module, "lora_A")] = rng.standard_normal((rank, inner)).astype(np.float32)
        found[layout.serving_name(module, "lora_B")] = rng.standard_normal((out, rank)).astype(np.float32)
    return found


def foreign(directory: Path, values: dict[str, Any] | None = None, **config: Any) -> Path:
    """A PEFT directory as others write it."""
    from safetensors.torch import save_file
    from torch import from_numpy

    theirs = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (directory / CONFIG_FILE).write_text(json.dumps({**theirs, **config}, indent=2), encoding="utf-8")
    save_file(values or {name: from_numpy(t) for name, t in tensors().items()}, directory / TENSOR_FILE)
    return directory


def test_both_layouts_of_an_adapter_turn_into_each_other_to_the_byte() -> None:
    serving = layout.tensor_file_bytes(tensors())
    training = training_layout(tensors())
    assert serving_layout(training) == serving
    from safetensors.numpy import load

    assert training_layout(load(serving)) == training
    assert training_layout(load(serving_layout(training))) == training


def test_a_training_checkpoint_has_the_bytes_that_a_learner_writes() -> None:
    """So that a policy trained from an import cannot tell it from one that was trained here."""
    import torch
    from safetensors.torch import save

    named = {name.removeprefix("base_model.model."): torch.from_numpy(t) for name, t in tensors().items()}
    assert training_layout(tensors()) == save(named)


def test_an_adopted_adapter_is_what_the_exporter_would_make_of_its_training_checkpoint(tmp_path: Path) -> None:
    adopted = adopt(tensors(), LORA, HOST)
    state = read_state(adopted.files[STATE_FILE])
    command = ExportRequested(
        command_id="r:export:0", run_id=state.run_id, policy=state.policy, base=HOST.base, step=0,
        checkpoint=CheckpointRef(files={}, step=0), lora=LORA, parent=None,
    )  # fmt: skip
    exported = convert(command, {n: adopted.files[n] for n in (ADAPTER_FILE, STATE_FILE)}, HOST, tmp_path)
    assert exported.files == {name: adopted.files[name] for name in (CONFIG_FILE, TENSOR_FILE)}
    assert exported.manifest == adopted.manifest


def test_an_adopted_adapter_is_admitted_as_its_manifest_says(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("zero", 1)):
        values = tensors(seed)
        if name == "zero":
            values = {n: np.zeros_like(t) if ".lora_B." in n else t for n, t in values.items()}
        adopted = adopt(values, LORA, HOST)
        directory = tmp_path / name
        directory.mkdir()
        for file in (CONFIG_FILE, TENSOR_FILE):
            (directory / file).write_bytes(adopted.files[file])
        assert adopted.manifest.zero_delta == (name == "zero")
        assert admit(adopted.manifest, directory, HOST).adapter_sha256 == adopted.manifest.adapter_sha256


def test_a_foreign_directory_is_read_and_its_settings_are_the_configs(tmp_path: Path) -> None:
    found = read_foreign(foreign(tmp_path, use_rslora=True, base_model_name_or_path="/theirs"), HOST)
    assert found.lora == Lora(rank=4, alpha=8.0, use_rslora=True, target_modules=("q_proj", "v_proj"))
    assert found.base == "/theirs"
    assert found.tensors.keys() == tensors().keys()
    assert all(np.array_equal(found.tensors[name], tensor) for name, tensor in tensors().items())


def test_half_precision_is_widened_exactly(tmp_path: Path) -> None:
    import torch

    values = {name: torch.from_numpy(t) for name, t in tensors().items()}
    halves = {n: t.to(torch.bfloat16 if ".lora_A." in n else torch.float16) for n, t in values.items()}
    found = read_foreign(foreign(tmp_path, halves), HOST)
    assert all(np.array_equal(found.tensors[name], half.float().numpy()) for name, half in halves.items())
    assert {tensor.dtype for tensor in found.tensors.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    "named", ["all-linear", r".*\.(q|v)_proj", ["self_attn.q_proj", "v_proj"], ["v_proj", "q_proj", "q_proj"]]
)
def test_target_modules_have_many_spellings_and_one_meaning(tmp_path: Path, named: Any) -> None:
    found = read_foreign(foreign(tmp_path, target_modules=named), HOST)
    assert found.lora.target_modules == ("q_proj", "v_proj")


@pytest.mark.parametrize("length", [0x80, 0x280])
def test_a_header_whose_length_looks_like_a_pickle_is_a_header(tmp_path: Path, length: int) -> None:
    """Its tensors are read; that there are too few of them is what is wrong with it."""
    foreign(tmp_path)
    header = b'{"__metadata__":{"format":"pt"}}'.ljust(length)
    (tmp_path / TENSOR_FILE).write_bytes(length.to_bytes(8, "little") + header)
    with pytest.raises(AdapterRefused, match="0 of 0 modules"):
        read_foreign(tmp_path, HOST)


def test_a_config_with_numbers_that_json_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match=CONFIG_FILE):
        read_foreign(foreign(tmp_path, lora_dropout=float("nan")), HOST)


def test_an_adapter_of_some_layers_only_is_refused(tmp_path: Path) -> None:
    import torch

    some = {name: torch.from_numpy(t) for name, t in tensors().items() if ".layers.0." in name}
    with pytest.raises(AdapterRefused, match="2 of 4 modules"):
        read_foreign(foreign(tmp_path, some, target_modules="all-linear"), HOST)


@pytest.mark.parametrize("dtype", ["float64", "int8", "float8_e4m3fn"])
def test_another_dtype_is_refused_by_name(tmp_path: Path, dtype: str) -> None:
    import torch

    cast = {name: torch.from_numpy(t).to(getattr(torch, dtype)) for name, t in tensors().items()}
    with pytest.raises(AdapterRefused, match="allowed: BF16, F16, F32"):
        read_foreign(foreign(tmp_path, cast), HOST)


def test_a_small_file_whose_products_are_huge_is_refused_before_anything_is_multiplied(tmp_path: Path) -> None:
    import torch

    # 128 KB a tensor; each product would have 256 MB.
    wide = {name: torch.ones((4, 8192) if "lora_A" in name else (8192, 4)) for name in tensors()}
    tracemalloc.start()
    try:
        with pytest.raises(AdapterRefused, match="has shape"):
            read_foreign(foreign(tmp_path, wide), HOST)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"r": 4', "[" * 100_000, "\xff"])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    foreign(tmp_path)
    (tmp_path / CONFIG_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(AdapterRefused, match=CONFIG_FILE):
        read_foreign(tmp_path, HOST)


@pytest.mark.parametrize("training", [b"", b"no tensors", layout.tensor_file_bytes({})[:-1]])
def test_a_training_checkpoint_that_cannot_be_read_is_said_so(training: bytes) -> None:
    with pytest.raises(Fatal, match="cannot be read"):
        serving_layout(training)


def test_a_training_checkpoint_in_another_precision_is_refused() -> None:
    from safetensors.numpy import save

    with pytest.raises(Fatal, match="float16"):
        serving_layout(save({"m.lora_A.weight": np.zeros((2, 2), np.float16)}))


def test_an_archive_depends_on_its_files_alone(tmp_path: Path) -> None:
    archives = []
    for number, order in enumerate((1, -1)):
        directory = tmp_path / str(number)
        directory.mkdir()
        for name in (CONFIG_FILE, TENSOR_FILE, COMPLETE_FILE)[::order]:
            (directory / name).write_bytes(name.encode() * 1000)
            (directory / name).chmod(0o600 + number)
        pack({path.name: path for path in directory.iterdir()}, directory / "a.tar.gz")
        archives.append((directory / "a.tar.gz").read_bytes())
    assert archives[0] == archives[1]
    with tarfile.open(tmp_path / "0" / "a.tar.gz") as tar:
        members = tar.getmembers()
        assert [member.name for member in members] == sorted([CONFIG_FILE, TENSOR_FILE, COMPLETE_FILE])
        assert {(member.mtime, member.uid, member.mode) for member in members} == {(0, 0, 0o644)}


def _delta(values: dict[str, layout.Array], scaling: float) -> dict[str, Any]:
    return {
        module: scaling
        * values[layout.serving_name(module, "lora_B")].astype(np.float64)
        @ values[layout.serving_name(module, "lora_A")].astype(np.float64)
        for module in MODULES
    }


def test_a_combination_is_the_nearest_of_its_rank_to_the_sum_of_what_the_adapters_do() -> None:
    sources = [Source(tensors(1), 2.0, 0.7), Source(tensors(2), 0.5, -0.4)]
    made = combine(sources, rank=4, scaling=2.0)
    cut = whole = 0.0
    for module, delta in _delta(made.tensors, 2.0).items():
        wanted = 0.7 * _delta(tensors(1), 2.0)[module] - 0.4 * _delta(tensors(2), 0.5)[module]
        u, s, vt = np.linalg.svd(wanted)
        assert np.allclose(delta, (u[:, :4] * s[:4]) @ vt[:4], atol=1e-4)
        cut, whole = cut + float((s[4:] ** 2).sum()), whole + float((s**2).sum())
    assert made.relative_error == pytest.approx((cut / whole) ** 0.5, rel=1e-6)


def test_a_combination_is_linear_and_does_not_depend_on_how_its_factors_are_written() -> None:
    """B·G⁻¹ and G·A are the same adapter; a sum of factors would make another policy of them."""
    values, mixing = tensors(1), np.random.default_rng(9).standard_normal((4, 4))
    written = {
        name: (mixing @ t if ".lora_A." in name else t @ np.linalg.inv(mixing)).astype(np.float32)
        for name, t in values.items()
    }
    half = combine([Source(values, 2.0, 0.5)], 4, 2.0)
    other = combine([Source(values, 2.0, 0.25), Source(written, 2.0, 0.25)], 4, 2.0)
    for module, delta in _delta(values, 2.0).items():
        assert np.allclose(_delta(half.tensors, 2.0)[module], delta / 2, atol=1e-4)
        assert np.allclose(_delta(other.tensors, 2.0)[module], delta / 2, atol=1e-3)
    assert half.relative_error < 1e-6
    assert other.relative_error < 1e-3


def test_a_combination_that_cancels_changes_nothing_and_can_still_be_trained() -> None:
    made = combine([Source(tensors(1), 2.0, 1.0), Source(dict(tensors(1)), 2.0, -1.0)], 4, 2.0)
    for module in MODULES:
        first, second = (made.tensors[layout.serving_name(module, part)] for part in ("lora_A", "lora_B"))
        assert np.allclose(second @ first, 0, atol=1e-5)
        assert np.allclose(first @ first.T, np.eye(4), atol=1e-5)


def test_one_source_with_coefficient_one_is_not_touched() -> None:
    source = Source(tensors(1), 2.0, 1.0)
    made = combine([Source(tensors(2), 2.0, 0.0), source], 4, 2.0)
    assert layout.tensor_file_bytes(made.tensors) == layout.tensor_file_bytes(tensors(1))


def test_a_combination_has_the_scaling_that_is_asked_for() -> None:
    made = combine([Source(tensors(1), 1.0, 1.0)], 4, 2.0)
    for module, delta in _delta(tensors(1), 1.0).items():
        assert np.allclose(_delta(made.tensors, 2.0)[module], delta, atol=1e-4)


def test_sources_that_do_not_fit_together_or_into_float32_are_refused() -> None:
    other = {name: t for name, t in tensors(2).items() if "q_proj" in name}
    with pytest.raises(ValueError, match=r"source 2 and source 1 .*v_proj"):
        combine([Source(tensors(1), 1.0, 0.5), Source(other, 1.0, 0.5)], 4, 1.0)
    with pytest.raises(ValueError, match="float32"):
        combine([Source(tensors(1), 1.0, 1e300)], 4, 1.0)


def test_an_imported_adapter_loads_in_plain_peft_and_computes_what_it_did(tmp_path: Path) -> None:
    """Made by PEFT, imported, packed, unpacked, loaded by PEFT again: the same logits."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from shared.adapters.host import base_modules

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).save_pretrained(tmp_path / "base")
    theirs = get_peft_model(
        LlamaForCausalLM.from_pretrained(tmp_path / "base"),
        LoraConfig(
            r=4, lora_alpha=12, use_rslora=True, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        ),
    ).eval()
    ids = torch.arange(12)[None]
    wanted = theirs(input_ids=ids).logits
    theirs.save_pretrained(tmp_path / "theirs")
    # What a gateway fetches is these two files; PEFT writes a README beside them.
    (tmp_path / "theirs" / "README.md").unlink(missing_ok=True)
    host = replace(HOST, target_modules=frozenset({"q_proj", "down_proj"}), modules=base_modules(tmp_path / "base"))
    found = read_foreign(tmp_path / "theirs", host)
    served = tmp_path / "served"
    served.mkdir()
    for name, data in adopt(found.tensors, found.lora, host).files.items():
        (served / name).write_bytes(data)
    pack({name: served / name for name in (CONFIG_FILE, TENSOR_FILE)}, tmp_path / "a.tar.gz")
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        tar.extractall(tmp_path / "out", filter="data")
    ours = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out").eval()
    assert torch.equal(ours(input_ids=ids).logits, wanted)
