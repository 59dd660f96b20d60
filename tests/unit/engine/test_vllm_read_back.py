"""The proof that vLLM's worker gives: what it says of slots that hold less, or something else, than the file.

Admission stops such adapters before vLLM sees them; here it is passed by, and the worker's bookkeeping
stands in memory, in the shape that vLLM keeps it.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared.adapters import layout
from tests.adapters import lora_tensors, write_adapter
from tests.serving_kit import make_base

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

LAYER = "model.layers.0"
PACKED = {
    f"{LAYER}.self_attn.qkv_proj": [f"{LAYER}.self_attn.{part}_proj" for part in "qkv"],
    f"{LAYER}.mlp.gate_up_proj": [f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"],
}
MODULES = [*PACKED, f"{LAYER}.self_attn.o_proj", f"{LAYER}.mlp.down_proj"]
ID, SLOT, SLOTS, RANK, MAX_RANK, SCALING = 7, 1, 3, 2, 4, 8.0


class Manager:
    """vLLM's LoRAModelManager as the worker reads it: a rank-2 adapter in slot 1 of 3, padded to rank 4."""

    def __init__(self, tensors: dict[str, torch.Tensor], taken: list[str], dtype: torch.dtype) -> None:
        self.lora_index_to_id = [3, ID, None]
        self.packed_modules = PACKED
        self.activated: list[int] = []
        self.modules = {name: _module(PACKED.get(name, [name]), tensors, dtype) for name in MODULES}
        self._taken = taken

    def activate_adapter(self, lora_id: int) -> None:
        self.activated.append(lora_id)

    def get_adapter(self, lora_id: int) -> Any:
        return SimpleNamespace(loras=dict.fromkeys(self._taken))


def _module(parts: list[str], tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    a_stacks, b_stacks = [], []
    for part in parts:
        a = tensors.get(layout.serving_name(part, "lora_A"), torch.zeros(1, 8))
        b = tensors.get(layout.serving_name(part, "lora_B"), torch.zeros(8, 1))
        a_stacks.append(torch.zeros(SLOTS, 1, MAX_RANK, a.shape[1], dtype=dtype))
        b_stacks.append(torch.zeros(SLOTS, 1, b.shape[0], MAX_RANK, dtype=dtype))
        a_stacks[-1][SLOT, 0, : a.shape[0]] = a
        b_stacks[-1][SLOT, 0, :, : b.shape[1]] = b.to(dtype) * SCALING
    return SimpleNamespace(lora_a_stacked=tuple(a_stacks), lora_b_stacked=tuple(b_stacks))


Read = Callable[..., dict[str, Any]]


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    base = make_base(tmp_path / "base")
    return {name: torch.from_numpy(value) for name, value in lora_tensors(base, RANK, seed=0, std=1.0).items()}


@pytest.fixture
def read(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Read:
    """Read slot 1 of a manager back against a file that holds `file` (default: `tensors`)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from shared.engine.vllm.worker import WorkerExtension

    def read_back(manager: Manager, file: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
        arrays = {name: value.numpy() for name, value in (file or tensors).items()}
        write_adapter(tmp_path / "adapter", make_base(tmp_path / "base"), "acme/p@1", rank=RANK, tensors=arrays)
        extension = WorkerExtension()
        extension.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
        answer: dict[str, Any] = extension.mint_read_back(ID, str(tmp_path / "adapter"), SCALING)
        assert manager.activated == [ID]
        return answer

    return read_back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slot_that_holds_the_file_is_all_of_it(
    read: Read, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    assert read(Manager(tensors, MODULES, dtype)) == {"applied": 4, "expected": 4, "equal": True}


def test_keys_that_match_no_module_are_none_of_them(read: Read, tensors: dict[str, torch.Tensor]) -> None:
    """vllm#34186, vllm#48019: vLLM accepts the file, and its slot stays empty."""
    renamed = {name.replace("model.layers", "model.language_model.layers"): t for name, t in tensors.items()}
    taken = [name.replace("model.layers", "model.language_model.layers") for name in MODULES]
    assert read(Manager({}, taken, torch.float32), renamed) == {"applied": 0, "expected": 7, "equal": True}


def test_a_module_that_was_left_out_is_missing(read: Read, tensors: dict[str, torch.Tensor]) -> None:
    assert read(Manager(tensors, MODULES[1:], torch.float32))["applied"] == 3


def _one_value(stack: torch.Tensor) -> None:
    stack[SLOT, 0, 0, 0] += 1e-6 + stack[SLOT, 0, 0, 0].abs() * 1e-2


def _unscaled(stack: torch.Tensor) -> None:
    stack[SLOT] /= SCALING


def _beyond_its_rank(stack: torch.Tensor) -> None:
    stack[SLOT, 0, -1, -1] = 1e-3


def _another_slot(stack: torch.Tensor) -> None:
    stack[[SLOT, 0]] = stack[[0, SLOT]]


@pytest.mark.parametrize("spoil", [_one_value, _unscaled, _beyond_its_rank, _another_slot])
@pytest.mark.parametrize("name", MODULES)
def test_a_slot_that_holds_something_else_is_seen(
    read: Read, tensors: dict[str, torch.Tensor], name: str, spoil: Callable[[torch.Tensor], None]
) -> None:
    """vllm#6909: an unscaled B is one of them."""
    manager = Manager(tensors, MODULES, torch.float32)
    spoil(manager.modules[name].lora_b_stacked[-1])
    assert read(manager) == {"applied": 4, "expected": 4, "equal": False}


def test_what_an_earlier_adapter_left_in_a_module_is_seen(read: Read, tensors: dict[str, torch.Tensor]) -> None:
    """An adapter of fewer targets must find zeros in the others."""
    fewer = {name: t for name, t in tensors.items() if "o_proj" not in name}
    taken = [name for name in MODULES if "o_proj" not in name]
    assert read(Manager(fewer, taken, torch.float32), fewer) == {"applied": 3, "expected": 3, "equal": True}
    assert not read(Manager(tensors, taken, torch.float32), fewer)["equal"]
