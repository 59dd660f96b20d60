"""Processes are killed between the acceptance of an operation and its result; it completes after the restart, once.

An undisturbed twin with the same seed says what must come out: every adapter of every step, byte for byte, each
committed once. The waits of a crash are short here; everything else is as it is.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from mint_schemas.cloudevents import run_id_for

from shared.ports import free_port
from tests.e2e.runs import Runs
from tests.e2e.tinker_wire import Model, Wire, backward, datum, forward, sample, step
from tests.stacks import StackProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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
KILLED = ("gateway", "catalog", "learner", "serving", "rollout", "exporter", "nats", "s3")


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


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, bases: Path) -> Iterator[World]:
    stack = StackProcess(tmp_path_factory.mktemp("tinker-faults") / "data", "transformers", bases, QUICK)
    try:
        stack.up()
        with Wire(stack.url) as wire, Runs(stack) as runs:
            yield World(stack, wire, runs)
    finally:
        stack.down()


@pytest.fixture(autouse=True)
def mended(world: World) -> None:
    """What a test before left dead is started."""
    if any(part["state"] != "ready" for part in world.stack.status()["services"].values()):
        world.stack.up()


@pytest.mark.parametrize("part", KILLED)
def test_what_was_accepted_completes_once_after_a_kill(world: World, part: str) -> None:
    """All of a program is accepted and nothing of it is done when `part` dies."""
    model = world.wire.model()
    with world.held() as parts:
        futures = [model.submit(path, content) for path, content in PROGRAM]
        drawn = world.asample()
        parts[part].kill()
        parts[part].wait(timeout=60)
    world.stack.up()
    assert world.ending(model, futures) == world.twin
    assert world.sequences(drawn) == world.drawn


@pytest.mark.parametrize(
    ("point", "done"), [("after_row", 0), ("before_files", 2), ("after_files", 2), ("after_row", 2), ("after_row", 5)]
)
def test_a_learner_that_dies_within_an_operation_applies_nothing_twice(
    world: World, point: str, done: int, tmp_path: Path
) -> None:
    """`done` operations have results already, so that the next learner has to replay the gradients of those behind
    the last step."""
    model = world.wire.model()
    futures = [model.submit(path, content) for path, content in PROGRAM[:done]]
    for request_id in futures:
        world.wire.result(request_id)
    world.arm("learner", point, tmp_path)
    futures += [model.submit(path, content) for path, content in PROGRAM[done:]]
    world.died("learner", point, tmp_path)
    world.stack.up()
    assert world.ending(model, futures) == world.twin


@pytest.mark.parametrize("point", ["after_row", "after_publish"])
def test_a_catalog_that_dies_with_a_message_promised(world: World, point: str, tmp_path: Path) -> None:
    model = world.wire.model()
    world.arm("catalog", point, tmp_path)
    first = _sent_until_it_dies(world, model, "catalog", point, tmp_path)
    world.stack.up()
    futures = [first, *(model.submit(path, content) for path, content in PROGRAM[1:])]
    assert world.ending(model, futures) == world.twin


def _sent_until_it_dies(world: World, model: Model, service: str, point: str, directory: Path) -> str:
    """The first operation; its answer may be lost, and then it is sent again to what was started anew."""
    body = model.body(PROGRAM[0][1])
    with suppress(httpx.HTTPError):
        world.wire.post(PROGRAM[0][0], body)
    world.died(service, point, directory)
    world.stack.up()
    return model.submit(*PROGRAM[0])


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


def test_two_gateways_are_one_server(world: World) -> None:
    """Every other request goes to the other one; what one accepted the other answers, when the first is gone too."""
    with another_gateway(world.stack) as url, Wire(url) as second:
        model = world.wire.model()
        twin = Model(second, model.model_id, model.session_id)
        futures = []
        for number, (path, content) in enumerate(PROGRAM, start=1):
            taker = model if number % 2 else twin
            futures.append(taker.submit(path, content, number=number))
        for request_id in futures:
            assert second.result(request_id) == world.wire.result(request_id)
        assert world.ending(model, futures) == world.twin
        again = twin.wire.send(PROGRAM[0][0], model.body(PROGRAM[0][1], 1))
        assert again["request_id"] == futures[0]
        late = model.submit("forward", forward(datum(6)), number=len(PROGRAM) + 1)
        world.stack.kill("gateway")
        assert "loss_fn_outputs" in second.result(late)
    world.stack.up()


def test_a_gap_is_waited_for_and_then_names_what_is_missing(world: World) -> None:
    """What came before the gap stands, what is behind it fails, and the model goes on."""
    model, twin = world.wire.model(), world.wire.model()
    twin.do("forward_backward", backward(datum(1)))
    expected = twin.do("optim_step", step())
    world.wire.result(model.submit("forward_backward", backward(datum(1)), number=1))
    behind = [model.submit("forward_backward", backward(datum(2)), number=number) for number in (3, 4)]
    for number, request_id in zip((3, 4), behind, strict=True):
        failed = world.wire.outcome(request_id)
        assert failed["category"] == "user"
        assert f"operation {number} waits for 2, which never came" in failed["error"]
    late = world.wire.post("forward_backward", model.body(backward(datum(2)), 2))
    assert late.status_code == 400
    assert "seq_id 2 was passed over" in late.json()["error"]
    again = model.submit("forward_backward", backward(datum(2)), number=3)
    assert again == behind[0]
    model.next = 5
    assert model.do("optim_step", step()) == expected


def test_a_number_that_comes_within_the_gap_is_in_time(world: World) -> None:
    model, twin = world.wire.model(), world.wire.model()
    for path, content in PROGRAM[:3]:
        twin.do(path, content)
    futures = [model.submit(*PROGRAM[number - 1], number=number) for number in (1, 3)]
    time.sleep(GAP_S / 3)
    futures.append(model.submit(*PROGRAM[1], number=2))
    for request_id in futures:
        world.wire.result(request_id)
    model.next = twin.next
    assert model.do("forward", forward(datum(9))) == twin.do("forward", forward(datum(9)))


def test_what_waits_behind_a_gap_survives_a_catalog_that_was_away_for_longer(world: World) -> None:
    """While it is away nobody can send the missing number, so that this time does not count."""
    model = world.wire.model()
    last = model.submit(*PROGRAM[2], number=3)
    world.stack.kill("catalog")
    time.sleep(GAP_S + 1)
    world.stack.up()
    futures = [model.submit(path, content) for path, content in PROGRAM[:2]] + [last]
    model.next = 4
    futures += [model.submit(path, content) for path, content in PROGRAM[3:]]
    assert world.ending(model, futures) == world.twin
