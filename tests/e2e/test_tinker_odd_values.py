"""Every field of every request of Tinker clients with values that no client means, and protobuf with bytes that changed
on the way: nothing is a 5xx, and nothing that fails is the server's fault.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import pytest

from services.gateway.tinker import wire_pb2
from tests.e2e.tinker_wire import (
    Model,
    Wire,
    backward,
    datum,
    forward,
    packed,
    proto_datum,
    sample,
    step,
    text,
)
from tests.stacks import StackProcess
from tests.tiny import TINY_NAME

pytestmark = pytest.mark.slow

ODD: tuple[Any, ...] = (
    None,
    "",
    "\x00",
    "é" * 400,
    -1,
    2**70,
    1e308,
    1.5,
    True,
    [],
    [[[]]],
    [None],
    {},
    {"a": {"b": 1}},
)
FLIPS = 120


class Target:
    """A session of its own, with a model and a sampler."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.model: Model = wire.model(rank=2)
        self.sampler, self.samples = wire.sampler(self.model.session_id), 0
        self.path = self.model.save_name("odd")

    def requests(self) -> dict[str, dict[str, Any]]:
        """A good body for each route, of the numbers that are next."""
        session = self.model.session_id
        lora = {"rank": 2, "seed": 1, "train_unembed": False, "train_mlp": True, "train_attn": True}
        kl = {"student_input": text([1, 2]), "reference_input": text([3, 1, 2])}
        targets = {"data": [2, 3], "dtype": "int64"}
        row = {**kl, "target_tokens": targets, "weights": {"data": [1.0, 1.0], "dtype": "float32"}}
        return {
            "client/config": {"sdk_version": "0.38.0"},
            "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0"},
            "session_heartbeat": {"session_id": session},
            "telemetry": {"events": [], "platform": "test", "sdk_version": "0.38.0", "session_id": session},
            "create_model": {
                "session_id": session,
                "model_seq_id": 0,
                "base_model": TINY_NAME,
                "user_metadata": {"a": "b"},
                "lora_config": lora,
            },
            "get_info": {"model_id": self.model.model_id},
            "forward": self.model.body(forward(datum(length=2))),
            "forward_backward": self.model.body(backward(datum(length=2), loss_fn_config={})),
            "optim_step": self.model.body(step()),
            "save_weights": self.model.body({"path": "odd-2", "ttl_seconds": 60, "overwrite": True}),
            "save_weights_for_sampler": self.model.body({"path": "odd-3", "ttl_seconds": 60}),
            "load_weights": self.model.body({"path": self.path, "optimizer": True}),
            "create_sampling_session": {
                "session_id": session,
                "sampling_session_seq_id": 0,
                "base_model": TINY_NAME,
            },
            "asample": sample(self.sampler, self.samples, prompt_logprobs=True, topk_prompt_logprobs=1),
            "retrieve_future": {"request_id": "0" * 32, "allow_metadata_only": True},
            "cancel_future": {"request_id": "0" * 32},
            "weights_info": {"tinker_path": self.path},
            "mint/forward_backward_reverse_kl": self.model.body(
                {"reference_model_path": self.path, "data": [row], "temperature": 1.0}
            ),
        }

    def ask(self, route: str, body: Mapping[str, Any] | bytes) -> None:
        """Whatever it is answered with, it is no fault of the server's; what it began ends."""
        answer = self.wire.post(route, body)
        assert answer.status_code < 500, f"{route} {_shown(body)}: {answer.text}"
        if answer.status_code >= 400:
            assert answer.json()["error"], answer.text
        else:
            self._ends(route, body, answer)

    def _ends(self, route: str, body: Mapping[str, Any] | bytes, answer: httpx.Response) -> None:
        found = answer.json() if answer.content else {}
        if route == "asample":
            self.samples += 1
        elif "request_id" in found and (isinstance(body, bytes) or body.get("seq_id") == self.model.next):
            self.model.next += 1
        if "request_id" in found and route != "retrieve_future":
            ended = self.wire.outcome(found["request_id"])
            assert ended.get("category", "user") == "user", f"{route} {_shown(body)}: {ended}"


def _shown(body: Mapping[str, Any] | bytes) -> str:
    return body.hex() if isinstance(body, bytes) else json.dumps(body)[:600]


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of each value within, but of a list only the first item's."""
    if at:
        yield at
    inner: Sequence[Any] = list(value) if isinstance(value, dict) else []
    if isinstance(value, list):
        inner = range(min(1, len(value)))
    for key in inner:
        yield from _places(value[key], (*at, key))


def _changed(body: dict[str, Any], at: tuple[Any, ...], odd: Any) -> dict[str, Any]:
    made = copy.deepcopy(body)
    inner: Any = made
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = odd
    return made


@pytest.fixture(scope="module")
def target(shared_stack: StackProcess) -> Iterator[Target]:
    with Wire(shared_stack.url) as wire:
        yield Target(wire)


ROUTES = (
    "client/config", "create_session", "session_heartbeat", "telemetry", "create_model", "get_info", "forward",
    "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "load_weights",
    "create_sampling_session", "asample", "retrieve_future", "cancel_future", "weights_info",
    "mint/forward_backward_reverse_kl",
)  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_odd_values_are_nobodys_fault_but_the_callers(target: Target, route: str) -> None:
    for at in _places(target.requests()[route]):
        for odd in ODD:
            target.ask(route, _changed(target.requests()[route], at, odd))
    assert target.model.do("forward", forward(datum(1)))["loss_fn_outputs"]


def test_changed_bytes_are_nobodys_fault_but_the_callers(target: Target) -> None:
    """Of the data alone, so that each goes to the model under its number."""
    flip = random.Random(20240207)
    for _ in range(FLIPS):
        head = wire_pb2.ForwardBackwardRequest(model_id=target.model.model_id, seq_id=target.model.next)
        head.loss_fn = "cross_entropy"
        weights = packed([1.0, 0.5, 0.25, 1.0])
        data = wire_pb2.ForwardBackwardRequest(data=[proto_datum(1, 4, weights=weights), proto_datum(2, 3)])
        body = bytearray(data.SerializeToString())
        for _ in range(flip.randint(1, 4)):
            body[flip.randrange(len(body))] = flip.randrange(256)
        target.ask("forward_backward", head.SerializeToString() + bytes(body))
    assert target.model.do("forward", forward(datum(1)))["loss_fn_outputs"]
