"""One tiny base on disk for the learner's tests, and fresh benches over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from services.learner.base_model import Precision, ResidentBase
from services.learner.datum import Datum
from services.learner.slots import Slot, SlotShape, SlotTable
from services.learner.trainer import TorchTrainer
from tests.tiny import make_tiny_base

torch.set_num_threads(1)

SHAPE = SlotShape(4, 8.0, False, ("q_proj", "v_proj", "down_proj"))


@dataclass
class Rig:
    """A resident tiny base with slots and a trainer."""

    base: ResidentBase
    slots: SlotTable
    trainer: TorchTrainer

    def fresh(self, policy: str, seed: int = 1, shape: SlotShape = SHAPE) -> Slot:
        slot = self.slots.acquire(policy, shape)
        slot.initialise(seed)
        return slot


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def rig(tiny_directory: Path) -> Callable[..., Rig]:
    def make(precision: Precision = "float32", max_tokens: int = 4096, capacity: int = 4) -> Rig:
        base = ResidentBase(tiny_directory, precision)
        slots = SlotTable(base, capacity)
        return Rig(base, slots, TorchTrainer(base, slots, max_tokens))

    return make


@pytest.fixture
def rows() -> Callable[..., list[Datum]]:
    """Ragged rows of random ids for cross_entropy, each with a masked head and Σc = 1 over all."""

    def make(count: int = 4, seed: int = 0, shortest: int = 5) -> list[Datum]:
        generator = torch.Generator().manual_seed(seed)
        ids = [torch.randint(3, 49152, (shortest + 1 + 3 * i,), generator=generator).tolist() for i in range(count)]
        total = sum(len(row) - 3 for row in ids)
        return [_row(f"row{i}", row, total) for i, row in enumerate(ids)]

    return make


def _row(name: str, ids: list[int], total: int) -> Datum:
    mask = tuple(i >= 2 for i in range(len(ids) - 1))
    weights = tuple(float(taken) for taken in mask)
    return Datum(name, tuple(ids[:-1]), tuple(ids[1:]), mask, {"weights": weights}, tuple(w / total for w in weights))
