"""Bare vLLM as the peer: its own OpenAI server on the same base, adapters and engine settings.

In: adapters by name and the settings of our engine. Out: a server's URL for as long as the context is open.
While it is not its turn it is stopped (SIGSTOP), so that it costs the others nothing. A peer may be given
our LoRA operators, so that its engine computes what ours does and only what stands before it differs.
Invariant: when the context ends, every process of the server has ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from cli.stack import bases
from loadtests.population.rig import BASE, say, send, stopped
from shared.bases import DENSE_TARGETS
from shared.engine.environment import vllm_environment
from shared.engine.settings import EngineSettings
from shared.ports import free_port

START_S = 300.0
STOP_S = 30.0
LOG_LINES = 15
# Names of vLLM's packed modules beside those of their parts: what our engine is started with too.
TARGETS = sorted({*DENSE_TARGETS, "qkv_proj", "gate_up_proj"})


class Peer:
    def __init__(self, url: str, process: psutil.Process) -> None:
        self.url, self._process = url, process

    def processes(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stopped while the context is open."""
        with stopped(self.processes()):
            yield


@contextmanager
def bare_vllm(
    adapters: Mapping[str, Path], settings: EngineSettings, log: Path, our_operators: bool = False
) -> Iterator[Peer]:
    """`adapters`: directories in PEFT layout by the name that requests use. `settings`: our engine's.

    Raises RuntimeError with the end of the log if the server does not come up."""
    port = free_port()
    arguments = command(adapters, settings, port)
    variables = {"TOKENIZERS_PARALLELISM": "false"}
    if our_operators:
        arguments += ["--worker-extension-cls", "shared.engine.vllm.worker.WorkerExtension"]
        variables["VLLM_SERVER_DEV_MODE"] = "1"
    with log.open("wb") as output, vllm_environment(settings):
        child = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            cwd=log.parent,
            start_new_session=True,
        )
    peer = Peer(f"http://127.0.0.1:{port}", psutil.Process(child.pid))
    try:
        _wait(child, peer, log)
        if our_operators:
            body = {"method": "mint_group_lora"}
            httpx.post(f"{peer.url}/collective_rpc", json=body, timeout=30.0, trust_env=False).raise_for_status()
        yield peer
    finally:
        _end(child, peer)


def command(adapters: Mapping[str, Path], settings: EngineSettings, port: int) -> list[str]:
    """Every argument of our engine that bears on speed, with its value; the rest is vLLM's default."""
    flags = {
        "model": bases.cache_dir() / "bases" / bases.SMOLLM2_TOKEN,
        "served-model-name": BASE,
        "host": "127.0.0.1",
        "port": port,
        "dtype": settings.dtype,
        "max-model-len": settings.max_context,
        "max-num-seqs": 64,
        "max-num-batched-tokens": max(2048, settings.max_context),
        "kv-cache-memory-bytes": settings.kv_cache_bytes,
        "max-loras": settings.slots,
        "max-cpu-loras": settings.max_resident,
        "max-lora-rank": settings.max_rank,
        "generation-config": "vllm",
    }
    given = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    switches = ["--enable-lora", "--no-enable-chunked-prefill", "--disable-log-stats"]
    named = [f"{name}={path}" for name, path in adapters.items()]
    module = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    return [*module, *given, *switches, "--lora-target-modules", *TARGETS, "--lora-modules", *named]


def _wait(child: subprocess.Popen[bytes], peer: Peer, log: Path) -> None:
    say("bare vLLM starts")
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            break
        try:
            if httpx.get(f"{peer.url}/health", timeout=2.0, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    raise RuntimeError(f"bare vLLM did not start (exit code {child.poll()}); {log} ends with:\n{tail}")


def _end(child: subprocess.Popen[bytes], peer: Peer) -> None:
    """Its engine processes outlive a server that is killed, so each is ended by its own handle."""
    try:
        running = peer.processes()
    except psutil.NoSuchProcess:
        running = []
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    _, alive = psutil.wait_procs([process for process in running if process.pid != child.pid], timeout=5.0)
    send(alive, signal.SIGKILL)
