"""SkyRL's Tinker server as the peer: `skyrl-tx` of PyPI with its JAX backend on the CPU, on the same base.

In: the Python of a venv that has `skyrl-tx[tinker]`, `jax`, `flax` and `optax`. Out: a server that runs while the
context is open, stopped (SIGSTOP) whenever it is not awake, so that it costs the others nothing. Invariant: when the
context ends, every process of the server has ended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from cli.stack import bases
from loadtests.population.rig import MAX_RANK, say
from shared.ports import free_port

__all__ = ["Peer", "skyrl"]

START_S = 120.0
ADAPTERS = 6
LOG_LINES = 15
# The server starts its engine with uv, out of a checkout; here the venv's Python is what uv would run.
UV = """#!/bin/sh
while [ "$1" != -m ]; do shift; done
exec {python} "$@"
"""


class Peer:
    def __init__(self, url: str, process: psutil.Process) -> None:
        self.url, self._process = url, process

    @contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def end(self) -> None:
        running = [*self._process.children(recursive=True), self._process]
        self._signal(signal.SIGCONT)
        self._process.terminate()
        _, alive = psutil.wait_procs(running, timeout=20.0)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=10.0)

    def _signal(self, number: signal.Signals) -> None:
        for process in [self._process, *self._process.children(recursive=True)]:
            process.send_signal(number)


@contextmanager
def skyrl(python: Path, folder: Path, rows: int, sequences: int) -> Iterator[Peer]:
    """`rows` and `sequences`: what one client learns and samples in a step. They are its micro-batches too, so that it
    compiles one shape for any number of clients. Raises RuntimeError with the end of its log if it does not come up."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    uv = folder / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(UV.format(python=python))
    uv.chmod(0o755)
    port = free_port()
    variables = {"PATH": f"{uv.parent}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    log = folder / "skyrl.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            command(python, base_for_it(folder / "base"), folder, port, rows, sequences),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**kept, **variables},
            cwd=folder,
            # When a shell ends, the kernel hangs up on what stands still in its process groups.
            start_new_session=True,
        )
    peer = Peer(f"http://127.0.0.1:{port}", psutil.Process(child.pid))
    try:
        _wait(child, peer, log)
        yield peer
    except Exception as error:
        # Its engine loads behind a server that is healthy at once, and takes the server with it when it fails.
        if child.poll() is None:
            raise
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise RuntimeError(f"skyrl-tx ended (exit code {child.poll()}); {log} ends with:\n{tail}") from error
    finally:
        if child.poll() is None:
            peer.end()


def base_for_it(folder: Path) -> Path:
    """The base as Transformers 4 reads it, which the peer is on: it knows neither the class of the tokenizer nor the
    place of `rope_theta` that Transformers 5 writes."""
    found = bases.cache_dir() / "bases" / bases.SMOLLM2_TOKEN
    folder.mkdir()
    for path in found.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((found / "config.json").read_text())
    _written(folder / "config.json", {**config, "rope_theta": config["rope_parameters"]["rope_theta"]})
    tokenizer = json.loads((found / "tokenizer_config.json").read_text())
    _written(folder / "tokenizer_config.json", {**tokenizer, "tokenizer_class": "PreTrainedTokenizerFast"})
    return folder


def _written(path: Path, value: dict[str, object]) -> None:
    path.unlink()
    path.write_text(json.dumps(value))


def command(python: Path, base: Path, folder: Path, port: int, rows: int, sequences: int) -> list[str]:
    backend = {
        "max_lora_adapters": ADAPTERS,
        "max_lora_rank": MAX_RANK,
        "train_micro_batch_size": rows,
        "sample_max_num_sequences": sequences,
    }
    flags = {
        "base-model": base,
        "backend-config": json.dumps(backend),
        "checkpoints-base": folder / "checkpoints",
        "database-url": f"sqlite:///{folder / 'tinker.db'}",
        "session-timeout-sec": -1,
        "host": "127.0.0.1",
        "port": port,
    }
    given = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return [str(python), "-m", "tx.tinker.api", *given]


def _wait(child: subprocess.Popen[bytes], peer: Peer, log: Path) -> None:
    say("skyrl-tx starts")
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and child.poll() is None:
        try:
            if httpx.get(f"{peer.url}/api/v1/healthz", timeout=2.0, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"skyrl-tx is not healthy after {START_S:.0f} s; its log is {log}")
