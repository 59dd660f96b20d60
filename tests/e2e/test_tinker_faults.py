"""Processes are killed between the acceptance of an operation and its result; it completes after the restart, once.

An undisturbed twin with the same seed says what must come out: every adapter of every step, byte for byte, each
committed once. The waits of a crash are short here; everything else is as it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.e2e.runs import Runs
from tests.e2e.tinker_faults_kit import GAP_S, PROGRAM, QUICK, World, another_gateway
from tests.e2e.tinker_wire import Model, Wire, backward, datum, forward, step
from tests.stacks import StackProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KILLED = ("gateway", "catalog", "learner", "serving", "rollout", "exporter", "nats", "s3")


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
