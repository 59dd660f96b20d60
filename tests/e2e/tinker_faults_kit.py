"""A stack whose parts die, and models that are trained on it: what tests of killed processes compare.

In: a running stack with the short waits of `QUICK`. Out: what a model came to, as clients and the catalog have it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from mint_schemas.cloudevents import run_id_for

from shared.ports import free_port
from tests.e2e.runs import Runs
from tests.e2e.tinker_wire import Model, Wire, backward, datum, forward, sample, step
from tests.stacks import StackProcess

GAP_S = 6.0
QUICK = {
    "MINT_SERVING_DTYPE": "float32",
    "MINT_LEARNER_PRECISION": "float32",
    "MINT_HEARTBEAT_S": "1",
    "MINT_ACK_WAIT_S": "3",
    "MINT_CATALOG_LEASE_TTL_S": "4",
    "MINT_CATALOG_COMMAND_DEADLINE_S": "6",
    "MINT_CATALOG_DRIVE_EVERY_S": "2",
    "MINT_CATALOG_OPERATION_GAP_S": str(GAP_S),
}
PROGRAM: tuple[tuple[str, dict[str, Any]], ...] = (
    ("forward_backward", backward(datum(1), datum(2, length=9))),
    ("forward_backward", backward(datum(3))),
    ("optim_step", step(3e-3)),
    ("forward_backward", backward(datum(4))),
    ("optim_step", step(1e-3)),
    ("save_weights", {"path": "end"}),
    ("save_weights_for_sampler", {"path": "end"}),
    ("forward", forward(datum(5))),
)
WORKERS = ("learner", "rollout")


@dataclass(frozen=True)
class Ending:
    """What a model came to: its results, and the adapter of each step that was committed."""

    results: list[dict[str, Any]]
    adapters: list[tuple[int, str]]


class World:
    """A stack whose parts die, and models that are trained on it."""

    def __init__(self, stack: StackProcess, wire: Wire, runs: Runs) -> None:
        self.stack = stack
        self.wire, self.runs = wire, runs
        twin = self.wire.model()
        self.twin = self.ending(twin, [twin.submit(path, content) for path, content in PROGRAM])
        self.sampler = self.wire.sampler(twin.session_id)
        self.samples = 0
        self.drawn = self.sequences(self.asample())

    def asample(self) -> str:
        """Each is the same but for its number."""
        self.samples += 1
        asked = sample(self.sampler, self.samples, num_samples=3, sampling_params={"max_tokens": 12})
        return str(self.wire.send("asample", asked)["request_id"])

    def sequences(self, request_id: str) -> list[tuple[list[int], str]]:
        """Whichever sequences are computed together, so that the logprobs' last digits are not compared."""
        return [(it["tokens"], it["stop_reason"]) for it in self.wire.result(request_id)["sequences"]]

    def ending(self, model: Model, futures: list[str]) -> Ending:
        results = [self.wire.result(request_id) for request_id in futures]
        facts = self.runs.facts(run_id_for("tinker", model.model_id), "policy.updated")
        shas = [(it["step"], it["checkpoint"]["files"]["adapter.safetensors"]["sha256"]) for it in facts]
        return Ending([_anonymous(result, model) for result in results], shas)

    def arm(self, service: str, point: str, directory: Path) -> None:
        """Start `service` anew, so that it kills itself at `point`; it may do so before all are healthy."""
        self.stack.kill(service)
        self.stack.up({"MINT_FAULT": f"{service}:{point}", "MINT_FAULT_DIR": str(directory)}, check=False)

    def died(self, service: str, point: str, directory: Path, timeout: float = 90) -> None:
        deadline = time.monotonic() + timeout
        while not (directory / f"{service}-{point}").exists():
            assert time.monotonic() < deadline, f"{service} never reached {point}: {self.stack.log(service)}"
            time.sleep(0.05)

    @contextmanager
    def held(self) -> Iterator[dict[str, psutil.Process]]:
        """All parts by name; the workers stand still, so that what is accepted meanwhile has no result yet."""
        parts = {name: psutil.Process(part["pid"]) for name, part in self.stack.status()["services"].items()}
        try:
            for name in WORKERS:
                parts[name].suspend()
            yield parts
        finally:
            for name in WORKERS:
                if parts[name].is_running():
                    parts[name].resume()


def _anonymous(result: dict[str, Any], model: Model) -> dict[str, Any]:
    """Without the names that no two models share."""
    return {key: value for key, value in result.items() if key not in ("path", "model_id")}


@contextmanager
def another_gateway(stack: StackProcess) -> Iterator[str]:
    """The url of a second one over the same catalog, started as the first one was."""
    pid = stack.pid("gateway")
    assert pid is not None
    first, port = psutil.Process(pid), free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    with (stack.data / "logs" / "gateway-2.log").open("ab") as log:
        env = {**first.environ(), "MINT_PORT": str(port)}
        process = subprocess.Popen(first.cmdline(), env=env, stdout=log, stderr=log, cwd=stack.data)
    try:
        deadline = time.monotonic() + 60
        while not _answers(url):
            assert time.monotonic() < deadline, "the second gateway never answered"
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
