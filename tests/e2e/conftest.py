"""Whole stacks on the tiny base: `shared_stack` for tests that only use it, `stack` for a module of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stacks import StackProcess, tiny_bases

FP32 = {"MINT_SERVING_DTYPE": "float32", "MINT_LEARNER_PRECISION": "float32"}
"""The tiny base computes in fp32, where the engine's logprobs must equal the trainer's."""


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory, bases: Path) -> Iterator[StackProcess]:
    yield from _running(tmp_path_factory.mktemp("shared-stack") / "data", bases)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, bases: Path) -> Iterator[StackProcess]:
    """For tests that kill parts of it."""
    yield from _running(tmp_path_factory.mktemp("stack") / "data", bases)


def _running(data: Path, bases: Path) -> Iterator[StackProcess]:
    found = StackProcess(data, "transformers", bases, FP32)
    try:
        yield found.up()
    finally:
        found.down()
