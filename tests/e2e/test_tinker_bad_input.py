"""What bad requests of Tinker clients get: a clear 4xx, or a future that fails as the user's fault, in words that name
what is wrong. Nothing is a 5xx, and the next good request is served.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from tests.e2e.tinker_bad_client import Client
from tests.e2e.tinker_bad_data import DATA as JSON_DATA
from tests.e2e.tinker_bad_proto import PROTO
from tests.e2e.tinker_bad_requests import COMPRESSED, MODELS, NAMES, NUMBERS, PATHS, SAMPLES
from tests.e2e.tinker_wire import Wire, backward, datum, forward, sample, step
from tests.stacks import StackProcess


@pytest.fixture(scope="module")
def keys(shared_stack: StackProcess) -> tuple[str, str]:
    """Of two tenants."""
    with httpx.Client(base_url=shared_stack.url, headers={"x-api-key": "tml-dev"}, trust_env=False) as http:
        made = [http.post("/mint/v1/keys", json={"tenant": tenant}) for tenant in ("bad-input", "bad-input-other")]
    first, second = (answer.raise_for_status().json()["key"] for answer in made)
    return first, second


@pytest.fixture(scope="module")
def client(shared_stack: StackProcess, keys: tuple[str, str]) -> Iterator[Client]:
    with Wire(shared_stack.url, keys[0]) as wire:
        yield Client(wire)


@pytest.fixture(scope="module")
def stranger(shared_stack: StackProcess, keys: tuple[str, str]) -> Iterator[Client]:
    """Of another tenant."""
    with Wire(shared_stack.url, keys[1]) as wire:
        yield Client(wire)


DATA = JSON_DATA | PROTO


def missing(words: tuple[str, ...], said: str) -> list[str]:
    return [word for word in words if word not in said]


@pytest.mark.parametrize("name", DATA)
def test_bad_data(client: Client, name: str) -> None:
    path, make, words = DATA[name]
    said = client.refusal(path, make(client.scene()))
    assert not missing(words, said), said
    client.trains()


@pytest.mark.parametrize("name", COMPRESSED)
def test_bad_compression(client: Client, name: str) -> None:
    path, make, encoding, words = COMPRESSED[name]
    content = {"content-encoding": encoding}
    kind = {"content-type": "application/json"} if path == "optim_step" else {}
    said = client.refusal(path, make(client.scene()), **content, **kind)
    assert not missing(words, said), said
    client.trains()


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_cannot_be(client: Client, name: str) -> None:
    number, words = NUMBERS[name]
    before = client.model.next
    for path, content in (("forward_backward", backward(datum())), ("optim_step", step())):
        said = client.refusal(path, {**client.model.body(content), "seq_id": number})
        assert not missing(words, said), said
    assert client.model.next == before
    client.trains()


def test_a_number_that_was_used(client: Client) -> None:
    """For what was sent it is the same future, for anything else a conflict, and neither is done again."""
    body = client.model.body(forward(datum(2)))
    first = client.wire.send("forward", body)
    client.model.next += 1
    client.trains()
    assert client.wire.send("forward", body) == first
    for path, content in (("forward", forward(datum(3))), ("optim_step", step()), ("save_weights", {"path": "x"})):
        answer = client.wire.post(path, {**client.model.body(content), "seq_id": body["seq_id"]})
        assert answer.status_code == 409
        assert not missing((f"operation {body['seq_id']}", "another content"), client.verdict(answer))
        assert answer.headers["x-should-retry"] == "false"
    client.trains()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be(client: Client, name: str) -> None:
    body, words = MODELS[name]
    about_the_session = "session" in name
    said = client.refusal("create_model", body if about_the_session else {**body, "session_id": client.session_id})
    assert not missing(words, said), said
    client.trains()


def test_a_model_number_that_was_used(client: Client) -> None:
    body = {**MODELS["a huge rank"][0], "session_id": client.session_id, "model_seq_id": 0}
    said = client.refusal("create_model", {**body, "lora_config": {"rank": 2, "seed": 1}})
    assert not missing(("409", "exists with other settings", "model_seq_id"), said), said
    client.trains()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_cannot_be(client: Client, name: str) -> None:
    for path in ("save_weights", "save_weights_for_sampler"):
        said = client.refusal(path, client.model.body({"path": name}))
        assert not missing(("name", "200"), said), said
    client.trains()


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_cannot_be(client: Client, path: str) -> None:
    sampler = {"session_id": client.session_id, "sampling_session_seq_id": 99, "model_path": path}
    begins = {"session_id": client.session_id, "model_seq_id": 99, "path": path, "optimizer": False}
    for said in (
        client.refusal("load_weights", client.model.body({"path": path, "optimizer": True})),
        client.refusal("load_weights", begins),
        client.refusal("create_sampling_session", sampler),
        client.refusal("weights_info", {"tinker_path": path}),
        client.refusal("copy_weights", {"source_path": path}),
    ):
        assert any(
            word in said
            for word in (
                "is no checkpoint path",
                "is no training run",
                "no kind",
                "is no path",
                "is no checkpoint name",
            )
        ), said
    client.trains()


@pytest.mark.parametrize("tail", ["..", "%2e%2e", "..%2f..%2fx", "a%2fb", "%00"])
def test_a_checkpoint_id_that_cannot_be(client: Client, tail: str) -> None:
    """As the rest of a URL, as it is."""
    checkpoints = f"training_runs/{client.model.model_id}/checkpoints/weights"
    for method, path, body in (
        ("GET", f"{checkpoints}/{tail}/archive", None),
        ("DELETE", f"{checkpoints}/{tail}", None),
        ("POST", f"{checkpoints}/{tail}/publish", None),
        ("PUT", f"{checkpoints}/{tail}/ttl", {"ttl_seconds": 60}),
    ):
        answer = client.wire.ask(method, path, json=body)
        assert answer.status_code in (400, 404, 405), answer.text
        client.verdict(answer)
    client.trains()


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_that_cannot_be(client: Client, name: str) -> None:
    path, make, words = SAMPLES[name]
    said = client.refusal(path, make(client.scene()))
    assert not missing(words, said), said
    client.samples()


def test_a_sample_number_that_was_used(client: Client) -> None:
    number = client.scene().next_sample
    client.samples()
    said = client.refusal("asample", sample(client.sampler, number, (1, 2)))
    assert not missing(("409", f"sample {number}", "another content"), said), said
    client.samples()


def test_what_is_another_tenants_is_not_there(client: Client, stranger: Client) -> None:
    """404 for everything of it, in the same words as for what nobody has."""
    path, future = client.model.save_name("mine"), client.model.submit("forward", forward(datum()))
    own = stranger.session_id
    told = {
        "forward_backward": client.model.body(backward(datum())),
        "optim_step": client.model.body(step()),
        "save_weights": client.model.body({"path": "theirs"}),
        "load_weights": client.model.body({"path": path, "optimizer": False}),
        "get_info": {"model_id": client.model.model_id},
        "unload_model": {"model_id": client.model.model_id},
        "retrieve_future": {"request_id": future},
        "cancel_future": {"request_id": future},
        "session_heartbeat": {"session_id": client.session_id},
        f"sessions/{client.session_id}/finish": {},
        "create_model": {**MODELS["a huge rank"][0], "session_id": client.session_id, "lora_config": {"rank": 2}},
        "create_sampling_session": {"session_id": own, "sampling_session_seq_id": 9, "model_path": path},
        "weights_info": {"tinker_path": path},
        "asample": sample(client.sampler, 0),
    }
    for route, body in told.items():
        answer = stranger.wire.post(route, body)
        assert answer.status_code == 404, f"{route}: {answer.status_code} {answer.text}"
        assert "there is no" in stranger.verdict(answer)
    _loads_as_no_path(stranger, path)
    client.wire.result(future)
    stranger.trains()
    client.trains()


def _loads_as_no_path(stranger: Client, path: str) -> None:
    """A model of one's own cannot be loaded from another tenant's path either."""
    said = stranger.refusal("load_weights", stranger.model.body({"path": path, "optimizer": False}))
    assert f"there is no path {path}" in said


def test_a_refused_optimizer_step_changes_nothing(client: Client) -> None:
    """Whatever failed before it: the gradients are those of the good forward_backward alone."""
    model, twin = (client.wire.model(client.session_id, number) for number in (1, 2))
    bad: Mapping[str, Any] = {**datum(), "loss_fn_inputs": {}}
    for each in (model, twin):
        each.do("forward_backward", backward(datum(4)))
    for content in (backward(bad), backward(datum(), loss="none"), backward(datum(length=2000))):
        found = client.wire.outcome(model.submit("forward_backward", content))
        assert found["category"] == "user"
    refused = client.wire.outcome(model.submit("optim_step", {"adam_params": {"learning_rate": -1}}))
    assert refused["category"] == "user"
    assert model.do("optim_step", step()) == twin.do("optim_step", step())
    assert model.do("forward", forward(datum(5))) == twin.do("forward", forward(datum(5)))


def test_a_key_that_nobody_has(shared_stack: StackProcess) -> None:
    with Wire(shared_stack.url, "tml-nobody") as wire:
        answer = wire.post("create_session", {"tags": []})
    assert answer.status_code == 401
    assert "key" in json.loads(answer.text)["error"]
