"""What the parts share: the call of a part, and a stack of its own whose serving replica they set up anew.

A part is a module with `measure(run: Run)`: it starts what it needs below `run.folder`, and gives its
figures to `run.keep` as they come, so that a run that is cut short loses nothing of what it had measured.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from cli.errors import CliError
from cli.stack import bases, launch, supervisor
from cli.terminal import TerminalReporter
from loadtests.learning.stack import Stack
from services.serving.config import ServingSettings
from shared.engine.settings import EngineSettings

BASE = bases.SMOLLM2_NAME
PATIENCE_S = 30.0
BACK_S = 60.0
MAX_RANK = 8

Rows = list[dict[str, Any]]
Samples = Mapping[str, list[float]]


@dataclass(frozen=True)
class Run:
    """`keep(name, rows, samples)` prints a table and stores it as `name` ("overhead.saturation");
    `samples` are series of seconds for the picture. `quick`: sizes that only show that the code works."""

    folder: Path
    quick: bool
    keep: Callable[[str, Rows, Samples | None], None]

    def pick(self, full: int, quick: int) -> int:
        return quick if self.quick else full


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Rig(Stack):
    """A stack whose serving replica can be set up anew. `settings` are the replica's, without their prefix:
    `slots=8`."""

    def __init__(self, folder: Path, engine: str, settings: Mapping[str, Any]) -> None:
        self.engine, self.settings = engine, dict(settings)
        self._up(folder)
        super().__init__(folder)

    def get(self, path: str) -> Any:
        """What the gateway answers."""
        return self._gateway.get(path)

    def restart(self, engine: str | None = None, empty_disk: bool = False, **settings: Any) -> None:
        """The replica alone, with `settings` over those that hold; `empty_disk`: its adapter files go."""
        launch.stop([(self._file().processes["serving"], PATIENCE_S)])
        if empty_disk:
            shutil.rmtree(self.folder / "serving", ignore_errors=True)
        self.engine = engine or self.engine
        self.settings |= settings
        self._up(self.folder)

    def engine_settings(self) -> EngineSettings:
        """What the replica's engine is started with."""
        held = ServingSettings(serving_base=BASE, **{f"serving_{name}": value for name, value in self.settings.items()})
        return EngineSettings(
            state_dir=self.folder / "engine-settings",
            dtype=held.serving_dtype,
            slots=held.serving_slots,
            max_resident=held.serving_max_resident,
            max_rank=held.serving_max_rank,
            kv_cache_bytes=held.serving_kv_bytes,
            max_context=held.serving_max_context,
            threads=held.serving_threads,
        )

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Each part's process and its descendants."""
        parts = {name: self.process(name) for name in self._file().processes}
        return {name: [process, *process.children(recursive=True)] for name, process in parts.items()}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The whole stack stopped while the context is open; `answering` says when it is back."""
        with stopped([process for found in self.processes().values() for process in found]):
            yield

    def answering(self) -> None:
        """Returns once a request to the base model is answered. Raises RuntimeError after `BACK_S`."""
        deadline = time.monotonic() + BACK_S
        body = {"model": BASE, "prompt": "one", "max_tokens": 1}
        while time.monotonic() < deadline:
            try:
                self._gateway.post("/v1/completions", body)
            except CliError:
                time.sleep(0.2)
                continue
            return
        raise RuntimeError(f"the stack in {self.folder} does not answer {BACK_S:.0f} s after it was stopped")

    def _up(self, folder: Path) -> None:
        options = supervisor.Options(engine=self.engine, free_ports=True)
        # The parts inherit our environment, and what is set for the replica must not outlive its start.
        variables = {f"MINT_SERVING_{name.upper()}": str(value) for name, value in self.settings.items()}
        with patch.dict(os.environ, variables):
            supervisor.up(folder, options, TerminalReporter())


@contextmanager
def rig(folder: Path, engine: str = "vllm", **settings: Any) -> Iterator[Rig]:
    """A fresh stack on SmolLM2 in `folder` (emptied first), gone at the end; its logs stay.

    The engine takes adapters up to rank 8, unless `settings` (as in `Rig`) say otherwise."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield Rig(folder.resolve(), engine, {"max_rank": MAX_RANK, **settings})
    finally:
        supervisor.down(folder, TerminalReporter(), now=True)
        for data in ("s3", "serving"):
            shutil.rmtree(folder / data, ignore_errors=True)


@contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    """By SIGSTOP, while the context is open."""
    send(processes, signal.SIGSTOP)
    try:
        yield
    finally:
        send(processes, signal.SIGCONT)


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    """To those that still run."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """User and system time so far, of those that still run."""
    total = 0.0
    for process in processes:
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += used.user + used.system
    return total
