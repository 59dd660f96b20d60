"""Operations of a model come once and in order, however they arrive, and their results stay to be read."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.tinker_wire import Model, Wire, backward, datum, forward, sample, step
from tests.stacks import StackProcess


@pytest.fixture(scope="module")
def wire(shared_stack: StackProcess) -> Iterator[Wire]:
    with Wire(shared_stack.url) as wire:
        yield wire


def seen(model: Model) -> object:
    """What the model computes now; equal adapters give equal numbers."""
    return model.do("forward", forward(datum(9), datum(10, length=9)))


def test_chunks_that_arrive_in_any_order_are_done_in_order(wire: Wire) -> None:
    """3, 1, 2: the step comes behind both forward_backwards. SkyRL#2048."""
    model, twin = wire.model(), wire.model()
    for path, content in (
        ("forward_backward", backward(datum(1))),
        ("forward_backward", backward(datum(2))),
        ("optim_step", step()),
    ):
        twin.do(path, content)
    last = model.submit("optim_step", step(), number=3)
    first = model.submit("forward_backward", backward(datum(1)), number=1)
    second = model.submit("forward_backward", backward(datum(2)), number=2)
    for request_id in (first, second, last):
        wire.result(request_id)
    model.next = 4
    assert seen(model) == seen(twin)


def test_what_comes_behind_a_gap_waits_for_it(wire: Wire) -> None:
    """It is not done before, nor as if the missing one did nothing."""
    model, twin = wire.model(), wire.model()
    early = model.submit("optim_step", step(), number=2)
    # Another model goes on meanwhile, so that there was time to do it.
    twin.do("forward_backward", backward(datum(3)))
    expected = twin.do("optim_step", step())
    model.submit("forward_backward", backward(datum(3)), number=1)
    assert wire.result(early) == expected
    model.next = 3
    assert seen(model) == seen(twin)


def test_a_future_can_be_read_again_and_again(wire: Wire) -> None:
    """Also after an answer that nobody read to its end."""
    model = wire.model()
    request_id = model.submit("forward_backward", backward(datum(1)))
    result = wire.result(request_id)
    with wire.stream("retrieve_future", {"request_id": request_id}) as answer:
        assert answer.status_code == 200
    answers = [wire.post("retrieve_future", {"request_id": request_id}) for _ in range(3)]
    assert {answer.content for answer in answers} == {answers[0].content}
    assert answers[0].json() == result
    protobuf = wire.post("retrieve_future", {"request_id": request_id}, accept="application/x-protobuf, */*")
    assert protobuf.headers["content-type"] == "application/x-protobuf"


def test_a_request_whose_answer_was_lost_is_the_same_when_it_is_sent_again(wire: Wire) -> None:
    """For each kind: one future, and one effect. SkyRL#2035."""
    model, twin = wire.model(), wire.model()
    program = [("forward_backward", backward(datum(1))), ("optim_step", step()), ("save_weights", {"path": "once"})]
    for path, content in program:
        body = model.body(content)
        with wire.stream(path, body) as lost:
            assert lost.status_code == 200
        futures = {wire.send(path, body)["request_id"] for _ in range(3)}
        (request_id,) = futures
        model.next += 1
        assert wire.result(request_id)
        twin.do(path, content)
    assert seen(model) == seen(twin)


def test_a_model_that_is_asked_for_again_is_the_same(wire: Wire) -> None:
    session_id = wire.session()
    first, again = wire.model(session_id, 3), wire.model(session_id, 3)
    assert first == again


def test_a_sample_that_is_sent_again_is_the_same(wire: Wire) -> None:
    sampler_id = wire.sampler(wire.session())
    futures = {wire.send("asample", sample(sampler_id, 0))["request_id"] for _ in range(3)}
    (request_id,) = futures
    assert wire.result(request_id) == wire.result(request_id)


def test_a_session_that_is_finished_takes_no_more_and_keeps_its_results(wire: Wire) -> None:
    model = wire.model()
    done = model.submit("forward_backward", backward(datum(1)))
    pending = [model.submit("forward", forward(datum(number))) for number in range(5)]
    assert wire.post(f"sessions/{model.session_id}/finish", {"reason": {"type": "user_exit"}}).status_code == 204
    assert wire.post(f"sessions/{model.session_id}/finish", {}).status_code == 204
    for request_id in (done, *pending):
        assert "loss_fn_outputs" in wire.result(request_id)
    for path, body in (
        ("session_heartbeat", {"session_id": model.session_id}),
        ("forward", model.body(forward(datum(0)))),
        ("optim_step", model.body(step())),
    ):
        answer = wire.post(path, body)
        assert answer.status_code == 410, answer.text
        assert "finished" in answer.json()["error"]
    answer = wire.post("create_sampling_session", {**_sampler_of(model), "base_model": "tiny/llama"})
    assert answer.status_code == 410


def _sampler_of(model: Model) -> dict[str, object]:
    return {"session_id": model.session_id, "sampling_session_seq_id": 0}


def test_an_unloaded_model_finishes_what_it_took_and_takes_no_more(wire: Wire) -> None:
    model = wire.model()
    pending = [model.submit("forward", forward(datum(number))) for number in range(3)]
    unloaded = {wire.send("unload_model", {"model_id": model.model_id})["request_id"] for _ in range(2)}
    (request_id,) = unloaded
    assert wire.result(request_id)["model_id"] == model.model_id
    for each in pending:
        assert "loss_fn_outputs" in wire.result(each)
    refused: httpx.Response = wire.post("forward", model.body(forward(datum(0))))
    assert refused.status_code == 400
    assert "unloaded" in refused.json()["error"]
