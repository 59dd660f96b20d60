"""What ends by silence: sessions without heartbeats, samplers that nobody samples from, results. Times are short."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import FP32
from tests.e2e.tinker_wire import Model, Wire, backward, datum, forward, sample, step
from tests.stacks import StackProcess

pytestmark = pytest.mark.slow

SESSION_TTL_S, EPHEMERAL_TTL_S = 8.0, 6.0
SHORT = {
    "MINT_CATALOG_DRIVE_EVERY_S": "1",
    "MINT_CATALOG_SESSION_TTL_S": str(SESSION_TTL_S),
    "MINT_CATALOG_SESSION_GRACE_S": "1",
    "MINT_CATALOG_EPHEMERAL_TTL_S": str(EPHEMERAL_TTL_S),
    "MINT_CATALOG_RESULT_TTL_S": "30",
}
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory, bases: Path) -> Iterator[Wire]:
    stack = StackProcess(tmp_path_factory.mktemp("tinker-expiry") / "data", "transformers", bases, {**FP32, **SHORT})
    try:
        with Wire(stack.up().url) as wire:
            yield wire
    finally:
        stack.down()


def alive(wire: Wire, session_id: str) -> bool:
    """A heartbeat, answered."""
    answer = wire.post("session_heartbeat", {"session_id": session_id})
    assert answer.status_code in (200, 410), answer.text
    return answer.status_code == 200


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def saved_for_sampling(model: Model, number: int) -> str:
    """The sampler of an ephemeral save."""
    return str(model.do("save_weights_for_sampler", {"sampling_session_seq_id": number})["sampling_session_id"])


def test_a_session_that_is_heard_from_stays(wire: Wire) -> None:
    model = wire.model()
    for _ in range(int(2 * SESSION_TTL_S)):
        time.sleep(1.0)
        assert alive(wire, model.session_id)
    assert model.do("forward", forward(datum(1)))["loss_fn_outputs"]


def test_a_silent_session_is_over_and_its_results_are_not(wire: Wire) -> None:
    """Its model is unloaded; nothing is accepted any more; what was done can still be read."""
    model = wire.model()
    done = model.submit("forward_backward", backward(datum(1)))
    result = wire.result(done)
    path = model.save_name("kept")
    until(lambda: f"{model.session_id}" in _over(wire, model))
    assert not alive(wire, model.session_id)
    refused = wire.post("optim_step", model.body(step()))
    assert refused.status_code == 410
    assert "expired" in refused.json()["error"]
    assert wire.result(done) == result
    again = {"session_id": wire.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    begun = wire.result(wire.send("load_weights", again)["request_id"])
    assert begun["path"] == path


def _over(wire: Wire, model: Model) -> str:
    """What a sampler of its session is refused with, which is no sign of life where it is refused."""
    body = {"session_id": model.session_id, "sampling_session_seq_id": 0, "model_path": "tinker://none/weights/none"}
    answer = wire.post("create_sampling_session", body)
    return str(answer.json()["error"]) if answer.status_code == 410 else ""


def sampled(wire: Wire, sampler_id: str, number: int) -> None:
    request_id = str(wire.send("asample", sample(sampler_id, number))["request_id"])
    assert wire.result(request_id)["sequences"]


def trained(model: Model, seed: int) -> None:
    """Saves of another state are another revision."""
    model.do("forward_backward", backward(datum(seed)))
    model.do("optim_step", step())


def test_an_ephemeral_sampler_that_nobody_uses_expires(wire: Wire) -> None:
    """One that is used lives on, and so does a named one."""
    model = wire.model()
    used = saved_for_sampling(model, 0)
    trained(model, 1)
    sampled(wire, used, 0)
    named = str(model.do("save_weights_for_sampler", {"path": "stays"})["path"])
    trained(model, 2)
    sampled(wire, used, 1)
    unused = saved_for_sampling(model, 1)
    first = wire.post("asample", sample(unused, 0))
    assert first.status_code == 200
    for number in range(2, int(3 * EPHEMERAL_TTL_S)):
        time.sleep(0.5)
        sampled(wire, used, number)
    late = wire.post("asample", sample(unused, 1))
    assert late.status_code == 410
    assert "expired" in late.json()["error"]
    assert wire.result(first.json()["request_id"])["sequences"]
    sampled(wire, wire.sampler(model.session_id, 5, model_path=named), 0)


def test_a_result_expires_and_says_so(wire: Wire) -> None:
    model = wire.model()
    request_id = model.submit("forward", forward(datum(1)))
    wire.result(request_id)
    until(lambda: wire.post("retrieve_future", {"request_id": request_id}).status_code == 410)
    answer = wire.post("retrieve_future", {"request_id": request_id})
    assert "expired" in answer.json()["error"]
