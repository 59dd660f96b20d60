"""One tiny base on disk for the learner's tests, and fresh benches over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from services.learner.base_model import Precision, ResidentBase
from services.learner.datum import Datum
from services.learner.slots import Slot, SlotShape, SlotTable
from services.learner.step import UpdateJob
from services.learner.trainer import TorchTrainer
from shared.bases import DENSE_TARGETS
from shared.store.memory import MemoryStore
from tests.tiny import make_tiny_base
from tests.unit.learner import architectures, jobs

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


@pytest.fixture(scope="session")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model of that architecture."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = architectures.make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return directory


@pytest.fixture
def rig(tiny_directory: Path) -> Callable[..., Rig]:
    def make(
        precision: Precision = "float32",
        max_tokens: int = 4096,
        capacity: int = 4,
        packing: bool = True,
        directory: Path = tiny_directory,
        targets: Sequence[str] = DENSE_TARGETS,
    ) -> Rig:
        base = ResidentBase(directory, precision, targets, packing=packing)
        slots = SlotTable(base, capacity, max_rank=16)
        return Rig(base, slots, TorchTrainer(base, max_tokens))

    return make


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def learner(tiny_directory: Path, store: MemoryStore) -> Callable[..., UpdateJob]:
    """A learner as after a start: nothing in its slots. The settings are those of `jobs.make_workbench`."""
    return partial(jobs.make_job, tiny_directory, store)


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
