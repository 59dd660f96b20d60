"""Whole stacks on the tiny base: `shared_stack` for tests that only use it, `stack` for a module of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.stacks import StackProcess, install_plugin, tiny_bases

FP32 = {"MINT_SERVING_DTYPE": "float32", "MINT_LEARNER_PRECISION": "float32"}
"""The tiny base computes in fp32, where the engine's logprobs must equal the trainer's."""


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="session")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """For a stack whose operators installed two reward plugins and allow webhooks on this machine."""
    paths = [str(install_plugin(tmp_path_factory.mktemp("plugin"))), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "MINT_REWARD_HOSTS": "127.0.0.1"}


@pytest.fixture(scope="session")
def shared_stack(
    tmp_path_factory: pytest.TempPathFactory, bases: Path, rewards: dict[str, str]
) -> Iterator[StackProcess]:
    yield from _running(tmp_path_factory.mktemp("shared-stack") / "data", bases, rewards)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, bases: Path) -> Iterator[StackProcess]:
    """For tests that kill parts of it."""
    yield from _running(tmp_path_factory.mktemp("stack") / "data", bases)


def _running(data: Path, bases: Path, env: Mapping[str, str] | None = None) -> Iterator[StackProcess]:
    found = StackProcess(data, "transformers", bases, {**FP32, **(env or {})})
    try:
        yield found.up()
    finally:
        found.down()
